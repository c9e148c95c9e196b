"""The environments of a stage, from its settings."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from rlhf_core.config.environments import ENVIRONMENTS, EnvironmentConfig, SingleTurn
from rlhf_core.contract import StageContext
from rlhf_core.environments.base import Environment, Environments
from rlhf_core.environments.single_turn import SingleTurnEnvironment
from rlhf_core.errors import EpisodeError


@contextmanager
def open_environments(config: EnvironmentConfig, context: StageContext) -> Iterator[Environments]:
    """What makes the environment of each episode; all that it has started ends with this context."""
    module, _, name = ENVIRONMENTS[config.type].implementation.partition(":")
    implementation: Any = getattr(import_module(module), name)
    own = issubclass(implementation, Environment)
    environments: Environments = OwnEnvironments(config, implementation) if own else implementation.of(config, context)
    with closing(environments):
        yield environments


def single_turn() -> Environments:
    """The reply to the prompt is the episode."""
    return OwnEnvironments(SingleTurn(), SingleTurnEnvironment)


class OwnEnvironments:
    """Objects of a class of ours, in this process."""

    tolerated_failures = 0.0

    def __init__(self, config: EnvironmentConfig, implementation: Callable[[EnvironmentConfig], Environment]) -> None:
        self.name = config.type
        self.max_turns = config.max_turns
        self._make = partial(implementation, config)

    def new(self) -> OwnEnvironment:
        return OwnEnvironment(self._make)

    def close(self) -> None:
        pass


class OwnEnvironment:
    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Environment | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self._environment = _called(self._make)
        return _called(self._environment.reset, row)

    async def step(self, reply: str) -> Any:
        assert self._environment is not None
        return _called(self._environment.step, reply)

    def close(self) -> None:
        pass


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # anybody's code may raise anything; its traceback is shown unchanged
        raise EpisodeError(f"it raised:\n{traceback.format_exc()}") from error
