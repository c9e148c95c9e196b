"""What the policy talks with in RL. `ENVIRONMENTS` lists all.

A new one is a file in rlhf_core/environments, its config class, and one line there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rlhf_core.config.base import operational
from rlhf_core.config.numbers import GiB, Seconds, Turns, no_bool
from rlhf_core.config.texts import AnswerPattern
from rlhf_core.config.typed import TypedConfig
from rlhf_core.config.user_code import CODE_FILES, CodeFiles, check_beside


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


class FunctionEnvironment(EnvironmentConfig):
    """An object of the user's Python file, made for each episode in a process of its own.

    It has `step(reply)`, which returns {messages, reward, done}, and may have `reset(row)`, which returns the messages
    that the policy is asked first. Both may be `async`.
    """

    type: Literal["function"]
    path: str = Field(description="a Python file; a relative path starts at the recipe's folder")
    function: str = Field(
        default="Environment",
        description="its name in the file: a class, or a function that makes one; called for each episode",
    )
    options: dict[str, Any] = Field(default={}, description="keyword arguments")
    tolerated_failures: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="share of a step's episodes that may fail; their prompts are left out of the step, and counted",
    )
    timeout_seconds: Seconds = operational(60.0, description="longest `reset` or `step`; a later answer is a failure")
    memory_gib: GiB = operational(
        4.0, description="memory that an episode may take beside what the file has loaded, GiB"
    )
    variables: tuple[str, ...] = operational(
        (), description="environment variables that it reads, such as one with a token"
    )
    files: CodeFiles = Field(default=(), description=CODE_FILES)

    def named_variables(self) -> tuple[str, ...]:
        return self.variables

    def named_files(self) -> tuple[str, ...]:
        return (self.path, *self.files)

    @model_validator(mode="after")
    def _files_beside(self) -> FunctionEnvironment:
        check_beside(self.path, self.files)
        return self


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    config: type[EnvironmentConfig]
    # "package.module:Class", imported only where it computes. An environments.base.Environment, or an Environments that
    # `of(config, context)` makes.
    implementation: str


ENVIRONMENTS: dict[str, EnvironmentEntry] = {
    "single_turn": EnvironmentEntry(SingleTurn, "rlhf_core.environments.single_turn:SingleTurnEnvironment"),
    "retry": EnvironmentEntry(Retry, "rlhf_core.environments.retry:RetryEnvironment"),
    "function": EnvironmentEntry(FunctionEnvironment, "rlhf_core.environments.function:FunctionEnvironments"),
}
