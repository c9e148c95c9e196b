"""Settings of the KL to the reference model, and of that model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Reads, operational
from rlhf_core.config.engines.placement import ModelPlacement, require_others
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.numbers import Coefficient, Nats, Steps

KLEstimator = Literal["k1", "k2", "k3"]
KLPlace = Literal["reward", "loss"]


def _estimator(default: KLEstimator) -> Any:
    return Field(default=default, description="with d = log p - log q: d, d²/2 or exp(-d) - 1 + d")


def _place(default: KLPlace) -> Any:
    return Field(default=default, description="place of the KL: subtracted from the reward, or a term of the loss")


class KLConfig(Config):
    """The KL to the reference model, as a part of the reward."""

    coefficient: Coefficient = Field(default=0.0, description="weight of the KL; 0: no reference model is loaded")
    estimator: KLEstimator = _estimator("k1")
    place: KLPlace = _place("reward")
    target: Nats | None = Field(
        default=None, description="target of an adaptive coefficient, in nats per completion; none: it is fixed"
    )
    horizon: Steps = Field(
        default=10, description="steps over which an adaptive coefficient reacts: 1 / K of arXiv:1909.08593"
    )
    reference: Annotated[str | None, Reads("model", optional=True)] = Field(
        default=None, description="stage of the reference model; none: the initial model of RL"
    )
    engine: EngineConfig | None = Field(
        default=None, description="engine settings of the reference; none: those of the policy"
    )
    offload: bool = operational(
        False, description="keep the reference's weights in host memory, except while it computes"
    )
    placement: ModelPlacement | None = operational(
        None, description="resources of the reference's own workers; none: it runs on the policy's"
    )

    @model_validator(mode="after")
    def _adapts_something(self) -> KLConfig:
        if self.target is not None and self.coefficient == 0:
            raise ValueError("target is set, but coefficient is 0 and would stay 0; set the coefficient to start from")
        return self

    @model_validator(mode="after")
    def _offload_frees_something(self) -> KLConfig:
        require_others(self.offload, self.placement, "reference")
        return self

    def unused_fields(self) -> frozenset[str]:
        return frozenset() if self.coefficient > 0 else frozenset({"reference", "engine"})


class LossKLConfig(KLConfig):
    """The KL to the reference model, as a loss term."""

    estimator: KLEstimator = _estimator("k3")
    place: KLPlace = _place("loss")


class SquaredKLConfig(LossKLConfig):
    """The KL to the reference model, as a loss term whose gradient is that of KL(policy || reference)."""

    estimator: KLEstimator = _estimator("k2")
