"""Construction of a stage's environments from its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.config.environments.environments import ENVIRONMENTS, AnyEnvironment, EnvironmentConfig, SingleTurn
from rlhf_core.contract import StageContext
from rlhf_core.environments.base import Environment, Environments, EpisodeEnvironment, Reply
from rlhf_core.environments.single_turn import SingleTurnEnvironment
from rlhf_core.errors import EpisodeError, RecipeError, StageError
from rlhf_core.processes.user_code import user_error


@contextmanager
def open_environments(config: AnyEnvironment, context: StageContext, tokenizer: Tokenizer) -> Iterator[Environments]:
    """Open the environments of a stage; all that they have started ends with the context.

    tokenizer: the policy's.
    """
    module, _, name = ENVIRONMENTS[config.type].implementation.partition(":")
    implementation: Any = getattr(import_module(module), name)
    in_process = issubclass(implementation, Environment)
    environments: Environments = (
        OwnEnvironments(config, implementation) if isinstance(config, EnvironmentConfig) and in_process
        else implementation.of(config, context, tokenizer)
    )  # fmt: skip
    with closing(environments):
        yield environments


def rows_to_play(rows: Iterable[Mapping[str, Any]], environments: Environments) -> Iterator[Mapping[str, Any]]:
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
                "its own: leave the column out, as by `columns: {unused: tools}`"
            )
        yield {**row, "tools": list(tools)} if tools else row


def single_turn() -> Environments:
    """Return the environments in which the reply to the prompt is the whole episode."""
    return OwnEnvironments(SingleTurn(), SingleTurnEnvironment)


class OwnEnvironments(Environments):
    """Environments of a class of this package, in this process."""

    def __init__(self, config: EnvironmentConfig, implementation: Callable[[EnvironmentConfig], Environment]) -> None:
        self.name = config.type
        self.max_turns = config.max_turns
        self._make = partial(implementation, config)

    def new(self) -> OwnEnvironment:
        return OwnEnvironment(self._make)


class OwnEnvironment(EpisodeEnvironment):
    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Environment | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self._environment = _called(self._make)
        return _called(self._environment.reset, row)

    async def step(self, reply: Reply) -> Any:
        assert self._environment is not None
        return _called(self._environment.step, reply.text)

    def close(self) -> None:
        pass


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # anybody's code may raise anything
        raise EpisodeError(f"it raised {user_error(error)}") from error
