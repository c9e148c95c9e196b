"""Checks of texts that are passed to other programs."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from typing import Annotated
from urllib.parse import urlsplit

import regex
from pydantic import AfterValidator, Field


def is_unicode(text: str) -> bool:
    """False for text with half of a surrogate pair, which JSON can escape and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_blank(text: str) -> bool:
    """Return whether `text` has no visible character: only white space, zero-width spaces, byte-order marks."""
    return all(character.isspace() or unicodedata.category(character) == "Cf" for character in text)


def is_hub_name(text: str) -> bool:
    """Return whether `text` is a valid name of a repository on the hub, with its owner."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text, re.ASCII) is not None


def hub_hint(text: str) -> str:
    """Return a hint for messages about a missing path; empty if it is no valid name of the hub."""
    return f"; if it is on the hub, write `{{type: hub, repository: {text}}}`" if is_hub_name(text) else ""


def names_a_host(url: str) -> bool:
    """Return whether the URL has a host, and either no port or a valid one."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port or an IPv6 address that is none
        return False


def _visible(text: str) -> str:
    if is_blank(text):
        raise ValueError("nothing of this text can be seen: write one, or remove it")
    return text


def _of_form(pattern: str, form: str) -> Callable[[str], str]:
    compiled = re.compile(pattern, re.ASCII)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(f"{text[:80]!r} is not {form}")
        return text

    return check


_MODEL_NAME = r"[a-z0-9][a-z0-9_.-]*"  # of a model in the registry, and of its aliases; a part of paths in the store


def is_model_name(text: str) -> bool:
    """Return whether `text` is a valid name of a model in the registry or of an alias."""
    return re.fullmatch(_MODEL_NAME, text, re.ASCII) is not None


Currency = Annotated[str, AfterValidator(_of_form(r"[A-Z]{3}", "a currency: three capital letters, such as EUR"))]
NonEmpty = Annotated[str, Field(min_length=1)]
ModelName = Annotated[
    str, AfterValidator(_of_form(_MODEL_NAME, "the name of a model: lower-case letters, digits and `_.-`"))
]
Visible = Annotated[str, AfterValidator(_visible)]
Repository = Annotated[
    str, AfterValidator(_of_form(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*", "`owner/name`, as the hub calls its repositories"))
]
Revision = Annotated[
    str, AfterValidator(_of_form(r"[\w][\w./+-]*", "a commit, a branch or a tag: letters, digits and `._/+-`"))
]
# pip gets it as an argument, and must not take it for an option.
Requirement = Annotated[
    str, AfterValidator(_of_form(r"[A-Za-z0-9][\w.-]*==[\w.!+-]+", "an exact requirement, such as name==1.2.3"))
]
Variable = Annotated[
    str, AfterValidator(_of_form(r"[A-Za-z_]\w*", "the name of an environment variable: letters, digits and `_`"))
]
HEADER_PREFIX = "ALIGNMENT_HEADER_"


def _header_variable(name: str) -> str:
    if not name.startswith(HEADER_PREFIX) or name == HEADER_PREFIX:
        raise ValueError(
            f"a recipe sends no other variables to servers than those whose names begin with {HEADER_PREFIX}: set "
            f"{HEADER_PREFIX}{name} to the header, and name that"
        )
    return name


# The recipe names the server too: its author must not choose which variable of the environment is sent there.
HeaderVariable = Annotated[Variable, AfterValidator(_header_variable)]
# A part of the names of metrics.
JudgeName = Annotated[
    str, AfterValidator(_of_form(r"\w[\w.-]{0,99}", "the name of a reward: up to 100 letters, digits and `_.-`"))
]
# A part of the names of reservations.
GroupName = Annotated[
    str, AfterValidator(_of_form(r"\w[\w.-]{0,99}", "the name of a group: up to 100 letters, digits and `_.-`"))
]
# Limits of Weights & Biases.
Project = Annotated[
    str, AfterValidator(_of_form(r"[^/\\#?%:\s][^/\\#?%:]{0,127}", r"a project: up to 128 signs, none of / \ # ? % :"))
]
Label = Annotated[str, AfterValidator(_of_form(r"\S(.{0,126}\S)?", "a name: one line of up to 128 signs"))]
check_tag = _of_form(r"\S(.{0,62}\S)?", "a tag: one line of up to 64 signs")
Tag = Annotated[str, AfterValidator(check_tag)]

_COUNT = re.compile(r"\{(\d{1,9})")
_MOST_REPEATS = 1_000_000


def _finds_an_answer(pattern: str) -> str:
    if math.prod(max(1, int(count)) for count in _COUNT.findall(pattern)) > _MOST_REPEATS:
        raise ValueError(
            f"the regular expression's repetitions, {{n}}, multiply to more than {_MOST_REPEATS}: it would be "
            "written out: repeat less, or by + or *"
        )
    try:
        groups = regex.compile(pattern).groups
    except regex.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    except RecursionError as error:
        raise ValueError("not a regular expression that can be read: hundreds of groups inside each other") from error
    if not groups:
        raise ValueError("the regular expression has no group: put ( ) around the part that is the answer")
    return pattern


AnswerPattern = Annotated[str, AfterValidator(_finds_an_answer)]
