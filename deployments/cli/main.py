"""The `alignment` command: one typer app, composed of the command modules beside this file.

A command module has its own `app = typer.Typer()` with `@app.command()` functions, and an entry in `_MODULES`.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import httpx
import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from deployments.cli import (
    artifacts,
    cluster,
    init,
    loop,
    merging,
    run,
    sampling,
    serving,
    stack,
    try_stage,
    ui,
    verification,
)
from deployments.cli.failures import explanation, prepare_streams, require_unicode
from deployments.cli.recipe_list import recipe_list
from deployments.stack.environment import load_stack_environment
from rlhf_core.errors import did_you_mean
from rlhf_core.system.variables import check_all

_MODULES = (stack, init, run, loop, try_stage, ui, artifacts, sampling, serving, merging, cluster, verification)


_WITH_ANY_VARIABLES = ("down", "status", "env")  # so that a stack can be ended whatever the shell's variables are
INTERRUPTED = 130  # the exit code after Ctrl-C


class _Commands(TyperGroup):
    """Prints expected errors in our words on stderr, with exit code 1; defects keep their traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            prepare_streams()
            try:
                return super().main(*args, **kwargs)
            finally:
                sys.stdout.flush()  # its failure is reported here
        except Exception as error:
            message = explanation(error)
            if message is None:
                raise
            _print_error(message)
            sys.exit(1)

    def invoke(self, ctx: Any) -> Any:
        try:
            arguments = [*ctx._protected_args, *ctx.args]
            require_unicode(arguments)
            if arguments[0] not in _WITH_ANY_VARIABLES:
                check_all()
            load_stack_environment()
            return super().invoke(ctx)
        except TyperException as error:
            raise _ended(_usage(error, ctx), code=2) from error
        except (KeyboardInterrupt, typer.Abort) as error:
            raise _ended("interrupted before it was done; nothing else was stopped", code=INTERRUPTED) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _ended(f"a server does not answer as expected: see `alignment status` ({error})") from error


def _usage(error: TyperException, ctx: Any) -> str:
    """Describe an error of the command line in our words, in place of typer's."""
    message = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    place = getattr(error, "ctx", None) or ctx
    commands, more = sorted(ctx.command.commands), ""
    if match := re.search(r"No such command '([^']*)'", message):
        what = f"there is no command `{match[1]}`{did_you_mean(match[1], commands)}; there are {', '.join(commands)}"
    elif match := re.search(r"No such option:? '?(-[\w-]*)", message):
        what = f"there is no option `{match[1]}`; a setting is given as key=value, such as seed=1"
    elif match := re.search(r"Missing (?:argument|option|parameter) '?\[?(-?[\w-]+)", message):
        what = f"{match[1] if match[1].startswith('-') else match[1].upper()} is missing"
        more = f"\n{recipe_list()}" if what == "RECIPE is missing" else ""
    else:
        what = f"the command line cannot be used ({message})"
    return f"{what}; `{place.command_path} --help` describes what may be given{more}"


def _print_error(text: str) -> None:
    if text:
        print(f"error: {text}", file=sys.stderr or sys.stdout, flush=True)


def _ended(text: str, code: int = 1) -> typer.Exit:
    _print_error(text)
    return typer.Exit(code)


app = typer.Typer(
    cls=_Commands,
    help="Align language models: SFT, reward model, RL, evaluation; every stage a Ray job, every result an artifact.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _module in _MODULES:
    app.add_typer(_module.app)

if __name__ == "__main__":
    app()
