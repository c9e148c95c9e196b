"""Kinds of verifiers. `VERIFIERS` lists all; a new one is a file in rlhf_core/rewards, and one line there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, operational, since_default
from rlhf_core.config.numbers import GiB, Seconds
from rlhf_core.config.texts import AnswerPattern


@dataclass(frozen=True, slots=True)
class VerifierKind:
    row_columns: tuple[str, ...]  # required in every row
    two_valued: bool  # an answer is right or wrong, never right in part
    implementation: str  # "package.module:Class" of a rewards.verifier.Judge, made by `of(config)`
    reads_answer: bool = True  # a right completion can be made of the row's `answer`
    runs_code: bool = False  # in the sandbox


VERIFIERS = {
    "exact": VerifierKind(("answer",), True, "rlhf_core.rewards.verifier:ExactAnswers"),
    "math": VerifierKind(("answer",), True, "rlhf_core.rewards.math_answers:MathAnswers"),
    "code_tests": VerifierKind(
        ("tests",), True, "rlhf_core.rewards.code_tests:CodeTests", reads_answer=False, runs_code=True
    ),
    "reasoning_gym": VerifierKind(("task", "metadata"), False, "rlhf_core.rewards.verifier:GymScores"),
}


class VerifierConfig(Config):
    """Settings of a verifier: the kind, and its limits."""

    kind: Literal["exact", "math", "code_tests", "reasoning_gym"] = Field(
        default="exact",
        description="compare with the row's `answer`, as text or as mathematics; run the row's `tests`; or use the "
        "task's own scorer",
    )
    pattern: AnswerPattern | None = Field(
        default=None, description="regular expression whose group 1 is the answer; none: the whole text"
    )
    timeout_seconds: Seconds = operational(
        10.0,
        description="time limit for the extraction of one answer, and for its scoring; exceeding it is an error, in "
        "`math` and `code_tests` a wrong answer",
    )
    memory_gib: GiB = since_default(0.5, description="code_tests: memory limit of a run of code beyond `modules`, GiB")
    modules: tuple[str, ...] = since_default(
        (), description="code_tests: modules that are preloaded for fast imports, such as numpy"
    )

    @property
    def verifier(self) -> VerifierKind:
        return VERIFIERS[self.kind]

    @model_validator(mode="after")
    def _limits_are_of_code(self) -> Self:
        fields = type(self).model_fields
        for name in ("memory_gib", "modules"):
            if not self.verifier.runs_code and getattr(self, name) != fields[name].default:
                raise ValueError(f"`{name}` is for kind: code_tests, and this is {self.kind}: remove it")
        return self
