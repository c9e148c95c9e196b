"""The output of a command: text for people or, with `--json`, one JSON document. Only this file decides which.

A command is registered by `printing` and returns a `Printed`. With `--json` its document is all that standard output
gets; whatever else this process prints goes to standard error, and so does an error, as JSON.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Annotated, Any, Generic, ParamSpec, TypeVar

import typer
from pydantic_core import to_json
from rich.console import RenderableType

from deployments.cli.console import console
from rlhf_core.errors import AlignmentError

_FLAG = "--json"
_JSON = Annotated[bool, typer.Option(_FLAG, help="Print JSON, as described in docs/reference/cli.md.")]

Document = TypeVar("Document")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result", bound="Printed[Any] | Iterator[Printed[Any]]")


@dataclass(frozen=True, slots=True)
class Printed(Generic[Document]):
    """The result of a command.

    document: a dataclass or a pydantic model, an object of JSON; its fields are documented in docs/reference/cli.md.
    text: the same for people. error: raised after printing, for a result that is bad news.
    """

    document: Document
    text: Iterable[RenderableType] = ()
    error: AlignmentError | None = None


def printing(
    app: typer.Typer, panel: str, name: str | None = None
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Register a command with the option `--json`; its group in the help is `panel`.

    A command that runs for long may return an iterator: its documents are lines of JSON.
    """

    def register(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def command(*args: Any, **options: Any) -> None:
            as_json = options.pop("json")
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                result = function(*args, **options)
            if isinstance(result, Printed):
                _print(result, as_json, indent=2)
                return
            for printed in result:
                _print(printed, as_json)

        signature = inspect.signature(function, eval_str=True)
        flag = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_JSON)
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), flag], return_annotation=None
        )
        command.__annotations__ = {**command.__annotations__, "json": _JSON, "return": None}
        app.command(name, rich_help_panel=panel)(command)
        return function

    return register


def _print(printed: Printed[Any], as_json: bool, indent: int | None = None) -> None:
    if as_json:
        print_json(printed.document, indent)
    else:
        for item in printed.text:
            console.print(item)
    if printed.error is not None:
        raise printed.error


def print_json(document: Any, indent: int | None) -> None:
    """Print a document, with `indent` None as one line. Numbers that are not finite become null."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # of JSON, whatever the terminal's is
    sys.stdout.write(to_json(document, indent=indent, inf_nan_mode="null").decode() + "\n")
    sys.stdout.flush()


def print_error(text: str, *, kind: str, exit_code: int, arguments: Sequence[str]) -> None:
    """Print an error on standard error, in the form that the command's arguments ask for."""
    line = f"error: {text}"
    if _FLAG in arguments:
        line = json.dumps({"error": {"type": kind, "message": text, "exit_code": int(exit_code)}}, ensure_ascii=False)
    print(line, file=sys.stderr or sys.stdout, flush=True)
