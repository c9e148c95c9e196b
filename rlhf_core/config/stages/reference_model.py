"""Settings of the reference of supervised training: the frozen model that a loss compares the policy with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Reads, operational
from rlhf_core.config.engines.training import SHARED_BY_RANKS, EngineConfig
from rlhf_core.config.stages.trained import SupervisedPolicyConfig

REFERENCE_INPUT = "reference.model"


class ReferenceConfig(Config):
    model: Annotated[str | None, Reads("model", optional=True)] = Field(
        default=None, description="stage of the reference model; none: the initial model"
    )
    engine: EngineConfig | None = Field(
        default=None, description="engine settings of the reference; none: those of the policy"
    )
    offload: bool = operational(
        False, description="keep the reference's weights in host memory, except while it computes"
    )


class PairReferenceConfig(ReferenceConfig):
    logprobs: Annotated[tuple[str, ...], Reads("logprobs", optional=True)] = Field(
        default=(),
        description="stages `logprobs` that have read all pairs, training and held-out, with the reference; none: "
        "computed during training",
    )


class ReferencedConfig(SupervisedPolicyConfig):
    """A policy trained against a reference, if its loss has one."""

    reference: ReferenceConfig = Field(default=ReferenceConfig(), description="the reference of the loss")
    dropout: bool = Field(
        default=False,
        description="train with the dropout and router noise of the model's config.json, and with that of an adapter: "
        "log-probs then differ between equal policy and reference",
    )

    @property
    @abstractmethod
    def uses_reference(self) -> bool:
        """True if the loss has a reference."""

    @property
    def runs_reference(self) -> bool:
        """True if training runs the reference itself."""
        return self.uses_reference

    @property
    def reference_engine(self) -> EngineConfig:
        return self.reference.engine or self.engine

    @property
    def reference_is_base(self) -> bool:
        """True if the reference is the policy's own base with the adapter switched off."""
        return self.runs_reference and self.lora is not None and self.reference.model is None

    @property
    def frozen_models(self) -> Mapping[str, EngineConfig]:
        copied = self.runs_reference and not self.reference_is_base
        start = "model" if self.reference.model is None else REFERENCE_INPUT
        return {start: self.reference_engine} if copied else {}

    @property
    def token_readers(self) -> Mapping[str, tuple[str, str]]:
        read = self.runs_reference and self.reference.model is not None
        return {REFERENCE_INPUT: (REFERENCE_INPUT, "name another model, or remove it")} if read else {}

    def unused_fields(self) -> frozenset[str]:
        return super().unused_fields() | (frozenset() if self.uses_reference else frozenset({"reference"}))

    @model_validator(mode="after")
    def _reference_is_used(self) -> Self:
        if not self.uses_reference and self.reference != type(self.reference)():
            raise ValueError("there is a block `reference`, but no loss has a reference: remove it")
        changed = {"engine": self.reference.engine is not None, "offload": self.reference.offload}
        setting = next((name for name, is_set in changed.items() if is_set), None)
        if self.reference_is_base and setting is not None:
            raise ValueError(
                f"reference.{setting}: with `lora` the reference is the policy's base with its adapter off, and has no "
                "weights of its own; remove it, or name a model as reference.model"
            )
        for name in ("dtype", "attention", *SHARED_BY_RANKS):
            policy_value, reference_value = getattr(self.engine, name), getattr(self.reference_engine, name)
            if policy_value != reference_value:
                raise ValueError(
                    f"reference.engine.{name} is {reference_value}, but the policy's is {policy_value}: rounding would "
                    "count as a preference; set both alike"
                )
        return self
