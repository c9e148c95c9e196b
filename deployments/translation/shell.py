"""Command lines in shell scripts, which are parsed and never run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from deployments.translation.settings import Expression, Origin
from rlhf_core.errors import RecipeError

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=([^\s;&|]*|\"[^\"$`]*\"|'[^']*')\s*(?:#.*)?")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}$]*))?\})")
LAUNCHED = "`alignment run` starts the jobs"

_INTERPRETER = ("python", "python3", "-m", "--module", "--")
_ENDS = ("|", "||", "&", "&&", ";", ">", ">>", "<", "2>&1", "2>", "EOF")


def command_line(origin: Origin, modules: tuple[str, ...]) -> tuple[str, list[str], list[str]]:
    """Return the module of `modules` that the script runs, its arguments, and what is before it.

    Variables that the script assigns are filled in. Raises RecipeError if there is not exactly one such command.
    """
    text = re.sub(r"\\[ \t]*\n", " ", origin.read())
    variables: dict[str, str] = {"HOME": os.path.expanduser("~")}
    found: list[tuple[str, list[str], list[str]]] = []
    for line in text.splitlines():
        if assigned := _ASSIGNMENT.fullmatch(line.strip()):
            variables[assigned[1]] = _filled(assigned[2].strip("\"'"), variables)
            continue
        if not any(module in line for module in modules):
            continue
        try:
            words = shlex.split(_filled(line, variables), comments=True)
        except ValueError as error:
            raise RecipeError(f"{origin.file}: its command cannot be split into words: {error}") from error
        for index, word in enumerate(words):
            if word in modules:
                end = next((i for i in range(index, len(words)) if words[i] in _ENDS), len(words))
                found.append((word, words[index + 1 : end], words[:index]))
                break
    if len(found) != 1:
        raise RecipeError(
            f"{origin.file}: it has {len(found)} commands of {', '.join(modules)}; give a script with one of them"
        )
    return found[0]


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Fill in the variables that are known; a default is used of those that are not."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, match[3] if match[3] is not None else match[0])

    return _VARIABLE.sub(value, text)


def launcher(before: Sequence[str]) -> dict[str, str]:
    """Return the words that start a module, but for an interpreter, as the setting `launcher`.

    Values of variables and options, which may be secrets, are left out.
    """
    shown = [re.sub(r"(?<==).+|^\{.+", "…", word) for word in before if word not in _INTERPRETER]
    return {"launcher": " ".join(shown)} if shown else {}


def is_computed(word: str) -> bool:
    """Return whether a word has what only the shell knows: an unset variable, or the output of a command."""
    return "$" in word or "`" in word


def value_or_expression(word: str, value: object) -> object:
    """Return `value`, or an Expression if the word is computed."""
    return Expression(word) if is_computed(word) else value
