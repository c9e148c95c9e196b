"""The part of a Dockerfile that a runtime without images follows: WORKDIR, ENV, COPY and RUN."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Literal

from rlhf_core.errors import RecipeError, one_line

# Instructions without an effect on the commands of a runtime: programs are those of the node.
_WITHOUT_EFFECT = frozenset({"FROM", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "STOPSIGNAL", "MAINTAINER", "HEALTHCHECK"})
_LINE = re.compile(r"(\S+)\s*(.*)", re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction. words: of WORKDIR the folder; of ENV name and value; of COPY sources and target; of RUN the
    command.
    """

    name: Literal["WORKDIR", "ENV", "COPY", "RUN"]
    words: tuple[str, ...]


def read_dockerfile(text: str) -> list[Step]:
    """Return the steps of a Dockerfile. Raises RecipeError for an instruction that needs an image."""
    steps: list[Step] = []
    stages = 0
    for line in _lines(text):
        match = _LINE.fullmatch(line)
        assert match is not None
        name, rest = match[1].upper(), match[2].strip()
        stages += name == "FROM"
        if stages > 1:
            raise RecipeError("a Dockerfile of several stages needs the runtime `container`")
        match name:
            case "WORKDIR":
                steps.append(Step("WORKDIR", (_plain(rest, line),)))
            case "ENV":
                steps += [Step("ENV", pair) for pair in _variables(rest, line)]
            case "COPY":
                steps.append(Step("COPY", _copied(rest, line)))
            case "RUN":
                steps.append(Step("RUN", (_command(rest, line),)))
            case _ if name not in _WITHOUT_EFFECT:
                raise _refused(line)
    return steps


def _lines(text: str) -> list[str]:
    """Return the instructions, each on one line, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    return [line.strip() for line in joined.splitlines() if line.strip()]


def _refused(line: str) -> RecipeError:
    return RecipeError(
        f"`{one_line(line)[:80]}` of the Dockerfile needs an image, which the runtime `sandbox` does not build: use "
        "the runtime `container`"
    )


def _plain(text: str, line: str) -> str:
    if not text or "$" in text:
        raise _refused(line)
    return text.strip("\"'")


def _words(text: str, line: str) -> list[str]:
    if "$" in text:
        raise _refused(line)
    try:
        words = json.loads(text) if text.startswith("[") else shlex.split(text)
    except ValueError as error:
        raise _refused(line) from error
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise _refused(line)
    return words


def _variables(text: str, line: str) -> list[tuple[str, str]]:
    words = _words(text, line)
    if words and "=" not in words[0]:  # the older form: ENV NAME value
        words = [f"{words[0]}={' '.join(words[1:])}"]
    pairs = [(name, value) for name, _, value in (word.partition("=") for word in words)]
    if not pairs or not all(_VARIABLE.fullmatch(name) for name, _ in pairs):
        raise _refused(line)
    return pairs


def _copied(text: str, line: str) -> tuple[str, ...]:
    words = _words(text, line)
    if len(words) < 2 or any(word.startswith("--") for word in words):
        raise _refused(line)
    return tuple(words)


def _command(text: str, line: str) -> str:
    if not text or text.startswith("--") or "<<" in text:
        raise _refused(line)
    return shlex.join(_words(text, line)) if text.startswith("[") else text
