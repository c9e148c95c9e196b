"""pass@1 (greedy) and pass@k (unbiased) of one model on held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from rlhf_core.config.base import Reads, operational, since_default
from rlhf_core.config.engines.rollout import SamplingConfig, require_different
from rlhf_core.config.environments.environments import AnyEnvironment, SingleTurn, ToleratesFailures, require_concurrent
from rlhf_core.config.numbers import GroupSize, Samples
from rlhf_core.config.rewards.rewards import require_environment
from rlhf_core.config.rewards.scorers import ScorerConfig
from rlhf_core.config.stages.base import EnginesConfig, JudgedBy, ResumedConfig, StageConfig
from rlhf_core.config.texts import JudgeName

Completions: TypeAlias = Literal["greedy", "sampled"]  # whose scores are compared


class EvaluatesModels(StageConfig):
    """A stage that evaluates each of `models` in a separate node, NAME.MODEL, with scores that gates compare."""

    models: Annotated[tuple[str, ...] | None, Reads("model", each="model")] = Field(
        default=None, description="stages of the models to compare; none: all above that make a model"
    )

    def score_problem(self, name: str, scorer: str | None, completions: Completions) -> str | None:
        """Return the problem of a gate that compares these scores of this stage, called `name`; None if it has them.

        It begins with the gate's setting, `scorer` or `completions`.
        """
        raise NotImplementedError

    @model_validator(mode="after")
    def _models_differ(self) -> Self:
        if self.models is not None and len(set(self.models)) != len(self.models):
            raise ValueError(f"models names one twice: {', '.join(self.models)}")
        if self.models == ():
            raise ValueError("models is an empty list: name a stage, or remove it for all that make a model")
        return self


class EvaluationConfig(EvaluatesModels, ResumedConfig, EnginesConfig):
    """Each of `models` is evaluated by a separate node, NAME.MODEL; one stage evaluates on one dataset."""

    dataset: Annotated[str, Reads("dataset", format="prompts", held_out=True)] = Field(
        description="name of an entry of the recipe's `data`, format prompts"
    )
    scorers: dict[JudgeName, ScorerConfig] = Field(
        min_length=1, description="scorers by name, each from 0 to 1; the first is the main one"
    )
    sampling: SamplingConfig = Field(description="sampling settings of pass@k; pass@1 is greedy")
    samples: Samples = Field(default=8, description="sampled completions per prompt, for pass@k; 0: greedy only")
    pass_at: tuple[GroupSize, ...] = Field(default=(1, 8), description="values of k of pass@k")
    prompts_per_call: GroupSize = operational(256, description="number of prompts sent to the engines at a time")
    environment: AnyEnvironment = since_default(
        SingleTurn(),
        description="the environment of an episode; scorers of text judge its last reply; default: one reply",
    )

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluationConfig:
        require_different(self.samples, self.sampling)
        return self

    @model_validator(mode="after")
    def _enough_samples(self) -> EvaluationConfig:
        largest = max(self.pass_at, default=1)
        if largest > 1 and largest > self.samples:
            raise ValueError(
                f"pass@{largest} needs at least {largest} samples of each prompt, but samples is {self.samples}"
            )
        return self

    @model_validator(mode="after")
    def _failures_count(self) -> EvaluationConfig:
        if isinstance(self.environment, ToleratesFailures) and self.environment.tolerated_failures:
            raise ValueError(
                "environment.tolerated_failures: without the episodes that fail, an evaluation would be of other "
                "prompts; remove it"
            )
        return self

    @model_validator(mode="after")
    def _environment_gives_scores(self) -> EvaluationConfig:
        if self.environment == SingleTurn():
            require_environment(self.scorers, "scorers")
        return self

    @model_validator(mode="after")
    def _programs_need_not_wait(self) -> EvaluationConfig:
        require_concurrent(self.environment, self.rollout)
        return self

    def score_problem(self, name: str, scorer: str | None, completions: Completions) -> str | None:
        if scorer is not None and scorer not in self.scorers:
            return f"scorer: `{name}` has no scorer `{scorer}`; it has {', '.join(self.scorers)}"
        if completions == "sampled" and not self.samples:
            return f"completions: `{name}` samples none: raise {name}.samples, or compare greedy"
        return None

    def text_readers_of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return () if self.environment.of_row(row).reads_images else ("environment",)

    def judges(self) -> Iterator[JudgedBy]:
        yield JudgedBy("environment", self.environment, "dataset")
        for name, scorer in self.scorers.items():
            yield JudgedBy(f"scorers.{name}", scorer, "dataset")
