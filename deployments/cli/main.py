"""The `alignment` command: one typer app, composed of the command modules beside this file.

A command module has its own `app = typer.Typer()` and an entry in `_MODULES`. Commands that print information are
registered by `printing` of output.py, others by `app.command`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import httpx
import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from deployments.cli import (
    artifacts,
    browse,
    cluster,
    cost,
    diff,
    exporting,
    garbage,
    init,
    loop,
    merging,
    registry,
    run,
    run_list,
    running,
    sampling,
    serving,
    stack,
    try_stage,
    ui,
    verification,
)
from deployments.cli.exit_codes import ExitCode, exit_code_of
from deployments.cli.failures import explanation, prepare_streams, require_unicode
from deployments.cli.output import print_error
from deployments.cli.recipe_list import recipe_list
from deployments.stack.environment import load_stack_environment
from rlhf_core import __version__
from rlhf_core.errors import did_you_mean, similar_name
from rlhf_core.system.variables import check_all

_MODULES = (
    stack, init, run, loop, try_stage, ui, browse, running, run_list, diff, cost, artifacts, registry,
    sampling, serving, merging, cluster, verification, garbage, exporting,
)  # fmt: skip

_WITH_ANY_VARIABLES = ("down", "status", "env")  # so that a stack can be ended whatever the shell's variables are


class _Commands(TyperGroup):
    """Prints expected errors in our words on stderr, with the exit codes of ExitCode; defects keep their traceback."""

    _arguments: Sequence[str] = ()

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        self._arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            prepare_streams()
            try:
                return super().main(self._arguments, *more, **options)
            finally:
                sys.stdout.flush()  # its failure is reported here
        except Exception as error:
            message = explanation(error)
            if message is None:
                raise
            code = exit_code_of(error)
            self._print_error(message, type(error).__name__, code)
            sys.exit(code)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().make_context(*arguments, **options)
        except TyperException as error:  # of an option before the command
            raise self._ended(_usage(error, self), "UsageError", ExitCode.USAGE) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            arguments = [*ctx._protected_args, *ctx.args]
            require_unicode(arguments)
            if arguments[0] not in _WITH_ANY_VARIABLES:
                check_all()
            load_stack_environment()
            return super().invoke(ctx)
        except TyperException as error:
            raise self._ended(_usage(error, self), "UsageError", ExitCode.USAGE) from error
        except (KeyboardInterrupt, typer.Abort) as error:
            text = "interrupted before it was done; nothing else was stopped"
            raise self._ended(text, "Interrupted", ExitCode.INTERRUPTED) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            text = f"a server does not answer as expected: see `alignment status` ({error})"
            raise self._ended(text, type(error).__name__, ExitCode.ERROR) from error

    def _ended(self, text: str, kind: str, code: ExitCode) -> typer.Exit:
        self._print_error(text, kind, code)
        return typer.Exit(code)

    def _print_error(self, text: str, kind: str, code: ExitCode) -> None:
        if text:
            print_error(text, kind=kind, exit_code=code, arguments=self._arguments)


def _usage(error: TyperException, group: TyperGroup) -> str:
    """Describe an error of the command line in our words, in place of typer's."""
    message = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    place = context.command_path if context is not None else "alignment"
    commands, more = sorted(group.commands), ""
    if match := re.search(r"No such command '([^']*)'", message):
        what = f"there is no command `{match[1]}`{did_you_mean(match[1], commands)}; there are {', '.join(commands)}"
    elif match := re.search(r"No such option:? '?(-[\w.-]*)", message):
        similar = similar_name(match[1].lstrip("-"), _options(context))
        near = "" if similar is None else f" (did you mean `--{similar}`?)"
        what = f"there is no option `{match[1]}`{near}; a setting is given as key=value, such as seed=1, without dashes"
    elif match := re.search(r"Missing (?:argument|option|parameter) '?\[([\w-]+(?:\|[\w-]+)+)\]", message):
        what = f"one of {', '.join(match[1].split('|'))} is missing"
    elif match := re.search(r"Missing (?:argument|option|parameter) '?\[?(-?[\w-]+)", message):
        what = f"{match[1] if match[1].startswith('-') else match[1].upper()} is missing"
        more = f"\n{recipe_list()}" if what == "RECIPE is missing" else ""
    elif match := re.fullmatch(r"Invalid value for '?([^:']+)'?(?: / '[^']+')*: (?:Value error, )?(.+?)\.?", message):
        what = f"{match[1]}: {match[2]}"
    else:
        what = f"the command line cannot be used ({message})"
    return f"{what}; `{place} --help` describes what may be given{more}"


def _options(context: Any) -> list[str]:
    """Return the long options of the context's command, without dashes, which would make all of them similar."""
    parameters = context.command.params if context is not None else ()
    return [name.removeprefix("--") for parameter in parameters for name in parameter.opts if name.startswith("--")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"alignment {__version__}")
        raise typer.Exit


app = typer.Typer(cls=_Commands, pretty_exceptions_enable=False)


@app.callback()
def alignment(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Align language models: SFT, reward models, RL, evaluation. Every stage is a Ray job, every result an artifact."""


for _module in _MODULES:
    app.add_typer(_module.app)

if __name__ == "__main__":
    app()
