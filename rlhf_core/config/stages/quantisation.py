"""Settings of quantisation: the frozen base of an adapter in 4 bits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf_core.config.base import Dtype, Reads, Role
from rlhf_core.config.stages.base import NamedStageConfig, Quantisation


class QuantiseConfig(NamedStageConfig):
    """Rounds the linear layers of a model, but its output head, to the values that they have when quantised.

    A stage with `lora.quantised` has such a node before it without being asked.
    """

    model: Annotated[str | None, Reads("model")] = Field(
        default=None, description="stage of the model; none: the last one above that makes a model"
    )
    quantisation: Quantisation = Field(
        default="nf4", description="nf4: 16 values in blocks of 64 weights, arXiv:2305.14314"
    )
    dtype: Dtype | None = Field(
        default=None, description="dtype of the stored weights, that of the training on them; none: the model's"
    )

    @property
    def makes(self) -> Role:
        return "model"

    @property
    def model_dtype(self) -> Dtype | None:
        return self.dtype
