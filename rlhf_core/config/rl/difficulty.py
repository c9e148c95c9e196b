"""Settings of the choice of prompts by their pass rates, and of the replay of groups with mixed outcomes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Reads
from rlhf_core.config.numbers import Age, PartialShare, Share, Steps

Bounds = tuple[Share, Share]


class CurriculumConfig(Config):
    """Bounds that move linearly from `start` to `pass_rate`."""

    start: Bounds = Field(description="lowest and highest pass rate at the first step; [0.5, 1]: easy prompts first")
    steps: Steps = Field(description="number of steps after which the bounds are those of `pass_rate`")

    @model_validator(mode="after")
    def _range(self) -> CurriculumConfig:
        _require_ordered("start", self.start)
        return self


class SelectConfig(Config):
    """Prompts are drawn if their pass rate, the mean score of their completions, is within bounds or unknown.

    The rate is that of the newest completions: of this run, else of the artifacts in `rates`.
    """

    pass_rate: Bounds = Field(default=(0.0, 1.0), description="lowest and highest pass rate of a prompt that is drawn")
    curriculum: CurriculumConfig | None = Field(
        default=None, description="bounds that move over the first steps; none: they are the same in all steps"
    )
    rates: Annotated[
        tuple[str, ...], Reads("dataset", or_role="model", format="completions", only_read=True, optional=True)
    ] = Field(
        default=(),
        description="datasets of completions with this reward (a stage `generate` or `score`, or kept rollouts), and "
        "models trained by RL with `select`, which give the rates before the first step",
    )
    forget_after: Steps | None = Field(
        default=None, description="number of steps after which a rate counts as unknown; none: never"
    )
    when_none: Literal["nearest", "stop"] = Field(
        default="nearest", description="if no prompt is within the bounds: draw the one nearest to them, or fail"
    )

    @model_validator(mode="after")
    def _range(self) -> SelectConfig:
        _require_ordered("pass_rate", self.pass_rate)
        if self.pass_rate == (0.0, 1.0) and self.curriculum is None:
            raise ValueError("pass_rate is [0, 1], which excludes no prompt: set bounds, such as [0.1, 0.9]")
        return self

    def bounds(self, step: int) -> Bounds:
        """Return the lowest and highest pass rate at `step`, counted from 0."""
        if self.curriculum is None or step >= self.curriculum.steps:
            return self.pass_rate
        done = step / self.curriculum.steps
        (low, high), (last_low, last_high) = self.curriculum.start, self.pass_rate
        return low + done * (last_low - low), high + done * (last_high - high)


class ReplayConfig(Config):
    """Groups with mixed outcomes are trained on once more. Their engine's log-probs are stored with them, so that
    `mismatch` corrects by exact ratios.
    """

    share: PartialShare = Field(description="maximum share of a step's prompts that are replayed, not sampled")
    max_age: Age = Field(default=1, description="maximum number of steps since their sampling")


def _require_ordered(name: str, bounds: Bounds) -> None:
    if bounds[0] > bounds[1]:
        raise ValueError(f"{name} is [{bounds[0]:g}, {bounds[1]:g}]: the first must not be more than the second")
