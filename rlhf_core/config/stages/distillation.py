"""Settings of distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Reads
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.numbers import Coefficient, DistillationTemperature, MixtureWeight
from rlhf_core.config.stages.trained import SupervisedPolicyConfig, require_same_ranks
from rlhf_core.config.stages.validation import ConversationsValidation

TEACHER_INPUT = "teacher.model"
STORED_INPUT = "teacher.top_logprobs"


class TeacherConfig(Config):
    """A frozen model that reads each step's tokens, or its stored log-probs."""

    model: Annotated[str | None, Reads("model", optional=True)] = Field(
        default=None, description="stage of the teacher model, run while the student is trained"
    )
    engine: EngineConfig | None = Field(
        default=None, description="engine settings of the teacher; none: those of the student"
    )
    top_logprobs: Annotated[tuple[str, ...], Reads("top_logprobs", optional=True)] = Field(
        default=(), description="instead of a model: stages `top_logprobs` that have read all rows, also held-out ones"
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.model is None) == (not self.top_logprobs):
            raise ValueError("name the teacher: either `model`, to run it, or `top_logprobs`, where it was run before")
        if self.top_logprobs and self.engine is not None:
            raise ValueError("`engine` is for a teacher that is run here, not for `top_logprobs`; remove it")
        return self


class DistillationConfig(SupervisedPolicyConfig):
    """A student learns a teacher's distribution over each token of assistant turns.

    With p the teacher's distribution and q the student's, both at `temperature` T, the loss is the mean over the
    trained tokens of T² x divergence + cross_entropy_coefficient x (-log q of the token at temperature 1). T² keeps the
    size of the divergence's gradient, which falls as 1 / T² (arXiv:1503.02531).

    forward_kl: KL(p || q). reverse_kl: KL(q || p) (arXiv:2306.08543). jensen_shannon: w KL(p || m) + (1 - w) KL(q || m)
    with w = `teacher_weight` and m = w p + (1 - w) q (arXiv:2306.13649).
    """

    dataset: Annotated[str, Reads("dataset", format="conversations")] = Field(
        description="name of an entry of the recipe's `data`, format conversations"
    )
    validation: ConversationsValidation | None = Field(
        default=None, description="validation on held-out rows during training; none: the result is the last weights"
    )
    teacher: TeacherConfig = Field(description="the model to learn from")
    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon"] = Field(
        default="forward_kl", description="divergence of the student from the teacher; forward_kl with stored log-probs"
    )
    teacher_weight: MixtureWeight = Field(default=0.5, description="jensen_shannon: the teacher's share of the mixture")
    temperature: DistillationTemperature = Field(
        default=1.0, description="temperature of both distributions; with stored log-probs, theirs"
    )
    cross_entropy_coefficient: Coefficient = Field(
        default=0.0, description="weight of the cross-entropy of the rows' own tokens"
    )

    @property
    def frozen_models(self) -> Mapping[str, EngineConfig]:
        return {} if self.teacher.top_logprobs else {TEACHER_INPUT: self.teacher_engine}

    @property
    def teacher_engine(self) -> EngineConfig:
        return self.teacher.engine or self.engine

    @property
    def stored_inputs(self) -> tuple[str, ...]:
        """Inputs with stored log-probs of a teacher; none if the teacher is run."""
        return tuple(f"{STORED_INPUT}.{name}" for name in self.teacher.top_logprobs)

    def unused_fields(self) -> frozenset[str]:
        unused = set() if self.divergence == "jensen_shannon" else {"teacher_weight"}
        return super().unused_fields() | unused | ({"temperature"} if self.teacher.top_logprobs else set())

    @model_validator(mode="after")
    def _teacher_is_on_the_same_ranks(self) -> Self:
        require_same_ranks(self.engine, {"teacher": self.teacher_engine} if self.frozen_models else {})
        return self

    @model_validator(mode="after")
    def _settings_are_used(self) -> Self:
        if self.divergence != "jensen_shannon" and self.teacher_weight != 0.5:
            raise ValueError(
                f"teacher_weight is a setting of jensen_shannon, but the divergence is {self.divergence}; remove it"
            )
        if self.teacher.top_logprobs and self.divergence != "forward_kl":
            raise ValueError(
                f"divergence is {self.divergence}, which weighs tokens that teacher.top_logprobs does not have: use "
                "forward_kl, or run the teacher: teacher.model"
            )
        if self.teacher.top_logprobs and self.temperature != 1.0:
            raise ValueError(
                "temperature: teacher.top_logprobs are of the temperature that their stage has; set it there"
            )
        return self
