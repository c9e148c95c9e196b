"""The `alignment` command: one typer app, composed of the command modules beside this file.

A command module has its own `app = typer.Typer()` with `@app.command()` functions, and an entry in `_MODULES`.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from deployments.cli import artifacts, init, run, stack, try_stage, verification
from deployments.stack.environment import load_stack_environment
from rlhf_core.errors import AlignmentError

_MODULES = (stack, init, run, try_stage, artifacts, verification)


class _Commands(TyperGroup):
    """Prints expected errors as one line on stderr, with exit code 1; defects keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            load_stack_environment()
            return super().invoke(ctx)
        except AlignmentError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error


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
