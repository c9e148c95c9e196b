"""Construction of a stage's environments from its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pkgutil import resolve_name
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.config.environments.environments import ENVIRONMENTS, AnyEnvironment, EnvironmentConfig, SingleTurn
from rlhf_core.contract import StageContext
from rlhf_core.environments.base import Environment, EnvironmentHost
from rlhf_core.environments.single_turn import SingleTurnEnvironment
from rlhf_core.errors import RecipeError, StageError


@contextmanager
def open_environments(config: AnyEnvironment, context: StageContext, tokenizer: Tokenizer) -> Iterator[EnvironmentHost]:
    """Open the environments of a stage; all that they have started ends with the context.

    tokenizer: the policy's.
    """
    implementation: Any = resolve_name(ENVIRONMENTS[config.type].implementation)
    in_process = issubclass(implementation, Environment)
    environments: EnvironmentHost = (
        InProcessHost(config, implementation) if isinstance(config, EnvironmentConfig) and in_process
        else implementation.of(config, context, tokenizer)
    )  # fmt: skip
    with closing(environments):
        yield environments


def rows_to_play(rows: Iterable[Mapping[str, Any]], environments: EnvironmentHost) -> Iterator[Mapping[str, Any]]:
    """Yield the rows that episodes start from, with the tools of their environments.

    Raises StageError for a row whose environment does not exist, or with tools that its environment does not run.
    """
    for row in rows:
        try:
            tools = environments.of_row(row).tools
        except RecipeError as error:
            raise StageError(f"row {row['id']}: {error}") from error
        if tools and row.get("tools"):
            raise StageError(
                f"row {row['id']} has `tools`, but its environment {environments.of_row(row).name} gives the policy "
                "its own: remove the column, as by `columns: {unused: tools}`"
            )
        yield {**row, "tools": list(tools)} if tools else row


def single_turn() -> EnvironmentHost:
    """Return the environments in which the reply to the prompt is the whole episode."""
    return InProcessHost(SingleTurn(), SingleTurnEnvironment)


class InProcessHost(EnvironmentHost):
    """Environments of a class, in this process."""

    def __init__(self, config: EnvironmentConfig, implementation: Callable[[Any], Environment]) -> None:
        self.name = config.type
        self.max_turns = config.max_turns
        self._make = partial(implementation, config)

    def new(self) -> Environment:
        return self._make()
