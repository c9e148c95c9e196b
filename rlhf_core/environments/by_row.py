"""Several environments in one stage: each dataset row names that of its episodes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.config.environments.environments import ByRow
from rlhf_core.contract import StageContext
from rlhf_core.environments.base import Environment, EnvironmentHost
from rlhf_core.environments.opening import open_environments


class HostByRow(EnvironmentHost):
    @classmethod
    def of(cls, config: ByRow, context: StageContext, tokenizer: Tokenizer) -> HostByRow:
        with ExitStack() as stack:
            choices = {
                name: stack.enter_context(open_environments(choice, context, tokenizer))
                for name, choice in config.choices.items()
            }
            return cls(config, choices, stack.pop_all())
        raise AssertionError("unreachable: no context above suppresses an error")

    def __init__(self, config: ByRow, choices: Mapping[str, EnvironmentHost], opened: ExitStack) -> None:
        """choices: by the names in rows. opened: closes them."""
        self.name = config.type
        self.max_turns = config.most_turns
        self.tolerated_failures = config.tolerated_failures
        bounds = [each.parallel_episodes for each in choices.values() if each.parallel_episodes is not None]
        self.parallel_episodes = min(bounds, default=None)
        self._config, self._choices, self._opened = config, choices, opened

    def of_row(self, row: Mapping[str, Any]) -> EnvironmentHost:
        return self._choices[self._config.name_of(row)].of_row(row)

    def new(self) -> Environment:
        raise AssertionError("an episode is one of a row's environment: see `of_row`")

    def close(self) -> None:
        self._opened.close()
