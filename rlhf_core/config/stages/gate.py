"""Settings of gates: whether a model may take the place of another one, by their evaluations."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Reads, operational
from rlhf_core.config.numbers import Share
from rlhf_core.config.stages.base import NamedStageConfig
from rlhf_core.config.stages.evaluation import Completions
from rlhf_core.config.texts import JudgeName, ModelName


class MetricConfig(Config):
    """A score of which two models are compared, prompt by prompt."""

    evaluation: Annotated[str, Reads("evaluation", evaluates=("candidate", "baseline"))] = Field(
        default="evaluation", description="the stage that evaluates both models"
    )
    scorer: JudgeName | None = Field(default=None, description="scorer to compare; none: the one with this name")
    completions: Completions = Field(
        default="greedy", description="the score of each prompt's greedy completion, or the mean of its sampled ones"
    )


class BetterConfig(MetricConfig):
    """A metric in which the candidate must be better."""

    by: Share = Field(
        default=0.0,
        description="the lower end of the 95 % interval of the mean difference must be above this",
    )


class NotWorseConfig(MetricConfig):
    """A guard rail: a metric in which the candidate may be worse by little."""

    than: Share = Field(
        default=0.0,
        description="maximum decrease of the mean score at the lower end of the 95 % interval of the difference",
    )


class ModelGateConfig(NamedStageConfig):
    """A gate between a candidate and the model that it is to replace. It passes if all metrics do; a refusal is a
    result and no failure.
    """

    candidate: Annotated[str, Reads("model")] = Field(description="stage of the candidate")
    baseline: Annotated[str, Reads("model")] = Field(
        description="stage of the model that it is compared with, such as a stage `artifact` of `support-bot/champion`"
    )
    better: dict[JudgeName, BetterConfig] = Field(default={}, description="metrics that must improve, by name")
    not_worse: dict[JudgeName, NotWorseConfig] = Field(default={}, description="guard rails, by name")
    model: ModelName | None = operational(
        None, description="model of the registry whose alias `candidate` a passed gate moves to the candidate"
    )
    approval: Literal["required"] | None = Field(
        default=None, description="`required`: the candidate becomes champion only by `alignment approve`"
    )

    @model_validator(mode="after")
    def _judges_something(self) -> Self:
        if not self.better and not self.not_worse:
            raise ValueError("better and not_worse are empty, so every candidate would pass: name a metric")
        if both := sorted(self.better.keys() & self.not_worse.keys()):
            raise ValueError(f"better and not_worse both have `{both[0]}`: remove one, or name it differently")
        if self.candidate == self.baseline:
            raise ValueError(f"candidate and baseline are both `{self.candidate}`: compare it with another model")
        if self.approval is not None and self.model is None:
            raise ValueError("approval: it is for the candidate of a model of the registry: set `model`")
        return self
