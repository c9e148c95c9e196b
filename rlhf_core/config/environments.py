"""What the policy talks with in RL. `ENVIRONMENTS` lists all.

A new one is a file in rlhf_core/environments, its config class, and one line there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from rlhf_core.config.numbers import Turns, no_bool
from rlhf_core.config.texts import AnswerPattern
from rlhf_core.config.typed import TypedConfig


class EnvironmentConfig(TypedConfig):
    """Every environment."""

    family: ClassVar[str] = "environment"

    max_turns: Turns = Field(default=4, description="replies of an episode at most")

    @classmethod
    def classes(cls) -> Mapping[str, type[Self]]:
        return {kind: entry.config for kind, entry in ENVIRONMENTS.items() if issubclass(entry.config, cls)}

    @property
    def row_columns(self) -> tuple[str, ...]:
        """Columns that every row must have which an episode starts from."""
        return ()


class SingleTurn(EnvironmentConfig):
    """One reply to the row's prompt, judged by the rewards alone."""

    type: Literal["single_turn"] = "single_turn"
    max_turns: Annotated[Literal[1], BeforeValidator(no_bool)] = Field(
        default=1, description="the reply is the episode"
    )


class Retry(EnvironmentConfig):
    """A wrong reply is answered by `feedback`, and the policy tries again. A right one ends the episode, and earns 1.

    A reply is right if the answer found in it equals the row's `answer`, as for the reward `verifier`.
    """

    type: Literal["retry"]
    pattern: AnswerPattern | None = Field(
        default=None, description="regular expression whose group 1 is the answer; none: the whole reply"
    )
    feedback: str = Field(
        default="That is wrong. Try again.", min_length=1, description="what the user says to a wrong reply"
    )

    @property
    def row_columns(self) -> tuple[str, ...]:
        return ("answer",)


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    config: type[EnvironmentConfig]
    implementation: str  # "package.module:Class", an environments.base.Environment; imported only where it computes


ENVIRONMENTS: dict[str, EnvironmentEntry] = {
    "single_turn": EnvironmentEntry(SingleTurn, "rlhf_core.environments.single_turn:SingleTurnEnvironment"),
    "retry": EnvironmentEntry(Retry, "rlhf_core.environments.retry:RetryEnvironment"),
}
