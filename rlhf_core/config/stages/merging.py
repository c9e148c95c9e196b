"""Settings of merging: an adapter into its base, and several models into one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Reads, Role
from rlhf_core.config.numbers import Coefficient, MergeWeight, PositiveShare
from rlhf_core.config.stages.base import MERGE_COPIES, NamedStageConfig


class MergeConfig(NamedStageConfig):
    """Merges an adapter into the model that it was trained on."""

    adapter: Annotated[str, Reads("adapter")] = Field(description="the stage that trained the adapter")
    model: Annotated[str | None, Reads("model", of="adapter")] = Field(
        default=None, description="stage of the model to merge it into; none: the one that it was trained on"
    )

    @property
    def makes(self) -> Role:
        return "model"

    @property
    def input_copies(self) -> float:
        return MERGE_COPIES


class OtherModelConfig(Config):
    model: Annotated[str, Reads("model")] = Field(description="stage of the model")
    weight: MergeWeight = Field(description="its weight in the result")


class MergeModelsConfig(NamedStageConfig):
    """Merges several models of the same shape and tokenizer, tensor by tensor.

    With W the weights of `model`, and W_i and w_i those of the others and their `weight`:

    linear: W + sum_i w_i (W_i - W), a mean if the w_i sum to less than 1 (arXiv:2203.05482).
    slerp: on the arc from W to the one other, the share w of its angle; linear where they are parallel.
    ties: W + scale x the merged changes W_i - W. The `density` largest entries of each change are kept; each entry gets
    the sign of the weighted sum of all; those of that sign are averaged by their weights (arXiv:2306.01708).
    """

    model: Annotated[str | None, Reads("model")] = Field(
        default=None, description="stage of the model W; none: the last one above that makes a model"
    )
    method: Literal["linear", "slerp", "ties"] = Field(description="merge method")
    others: tuple[OtherModelConfig, ...] = Field(min_length=1, description="the other models, with their weights")
    density: PositiveShare = Field(default=0.2, description="ties: share of a change's entries that are kept")
    scale: Coefficient = Field(default=1.0, description="ties: factor of the merged change")

    @property
    def makes(self) -> Role:
        return "model"

    @property
    def input_copies(self) -> float:
        return 1.0

    def unused_fields(self) -> frozenset[str]:
        return frozenset() if self.method == "ties" else frozenset({"density", "scale"})

    @model_validator(mode="after")
    def _settings_are_used(self) -> MergeModelsConfig:
        if self.method == "slerp" and (len(self.others) > 1 or not 0 <= self.others[0].weight <= 1):
            raise ValueError("slerp goes from `model` to one other model by a weight from 0 to 1; or use linear")
        fields = type(self).model_fields
        changed = [name for name in ("density", "scale") if getattr(self, name) != fields[name].default]
        if self.method != "ties" and changed:
            raise ValueError(f"{changed[0]} is a setting of ties, but the method is {self.method}; remove it")
        if self.method == "ties" and any(other.weight <= 0 for other in self.others):
            raise ValueError("ties averages changes by their weights: each must be more than 0")
        return self
