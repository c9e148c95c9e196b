"""Write the page of all commands, generated from the command line itself.

Usage: `python -m deployments.pages.commands docs/reference/commands.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, get_args, get_origin

import typer

from deployments.cli.main import app

_HEAD = """# Every command

Written by `python -m deployments.pages.commands docs/reference/commands.md`: edit the help of the commands instead.
[The command line](cli.md) has exit codes, JSON documents and completion.
"""


def page() -> str:
    """Return the text of docs/reference/commands.md."""
    groups: dict[str, list[str]] = {}
    for names, command in _commands(typer.main.get_command(app), ()):
        groups.setdefault(_panel_of(names[0]), []).append(_section(names, command))
    parts = [_HEAD, *(f"## {panel}\n\n" + "\n\n".join(sections) + "\n" for panel, sections in groups.items())]
    return "\n".join(parts)


def _panel_of(name: str) -> str:
    root: Any = typer.main.get_command(app)
    return str(root.commands[name].rich_help_panel)


def _commands(group: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the names and the command of each leaf of `group`, in the order of `--help`."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, (*names, name))
        else:
            yield (*names, name), command


def _section(names: Sequence[str], command: Any) -> str:
    parameters = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in parameters if not _is_option(parameter)]
    usage = " ".join(
        ["alignment", *names, *map(_shown, arguments), *(["[OPTION …]"] if parameters != arguments else [])]
    )
    entries = [
        _wrapped(f"- {_named(parameter)}{_default(parameter)}: {_one_line(parameter.help or '')}", "  ")
        for parameter in parameters
    ]
    paragraphs = [_wrapped(_one_line(text)) for text in (command.help or "").strip().split("\n\n")]
    about = "\n\n".join(paragraphs)
    return "\n".join(
        [f"### {' '.join(names)}", "", about, "", "```", usage, "```", *([""] if entries else []), *entries]
    )


def _is_option(parameter: Any) -> bool:
    return str(parameter.opts[0]).startswith("-")


def _shown(argument: Any) -> str:
    """Return an argument as a usage line has it."""
    name = argument.metavar or argument.name.upper()
    several = " …" if argument.nargs == -1 else ""
    return f"{name}{several}" if argument.required or name.startswith("[") else f"[{name}{several}]"


def _named(parameter: Any) -> str:
    if not _is_option(parameter):
        return f"`{_one_line(_shown(parameter))}`"
    flags = [*parameter.opts, *parameter.secondary_opts]
    value = "" if parameter.is_flag else f" {_one_line(_value(parameter))}"
    repeated = ", any number of times" if parameter.multiple else ""
    return ", ".join(f"`{flag}{value}`" for flag in flags) + repeated


def _value(option: Any) -> str:
    """Return what stands for the value of an option."""
    kind = option.type_descriptor.annotation
    if option.metavar:
        return str(option.metavar)
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    inner = next(iter(get_args(kind)), kind)
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(inner, "TEXT")


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return " (**required**)"
    if value in (None, False, "", (), []) or callable(value):
        return ""
    return f" (default `{_one_line('on' if value is True else str(getattr(value, 'value', value)))}`)"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;")


def _wrapped(text: str, indent: str = "") -> str:
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main(arguments: list[str]) -> None:
    Path(arguments[0]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
