"""The reference model of a policy: the frozen model that a KL or a preference loss compares it with.

If the policy is an adapter and the reference its base, both share one copy of the weights. Otherwise the reference is a
frozen copy of the initial policy or of another model, whose weights may stay in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from torch import nn

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.models.adapters import is_adapted
from rlhf_core.models.loading import load_causal_model, torch_dtype
from rlhf_core.models.packed import PackedModel, PolicyModel
from rlhf_core.training.build import build_engine, sharding
from rlhf_core.training.engine import TrainingEngine
from rlhf_core.types import PackedBatch

B = TypeVar("B", bound=PackedBatch)
R = TypeVar("R")


class Reference(Protocol):
    """A reference model. Every rank must call every method."""

    @property
    def shares_prompts(self) -> bool:
        """As TrainingEngine.shares_prompts."""

    def forward(self, micro_batches: Sequence[B], function: Callable[[nn.Module, B], R]) -> list[R]:
        """As TrainingEngine.forward."""

    def offload(self) -> None:
        """Move all tensors off the device until `reload`."""

    def reload(self) -> None:
        """Move the weights back to the device, unless they stay in host memory."""


class AdapterOff:
    """The base of a LoRA policy: the policy's own weights with the adapter switched off."""

    def __init__(self, policy: TrainingEngine) -> None:
        """policy: the engine of a PeftModel."""
        model = policy.module.model
        assert is_adapted(model)
        self._policy, self._model = policy, model

    @property
    def shares_prompts(self) -> bool:
        return self._policy.shares_prompts

    def forward(self, micro_batches: Sequence[B], function: Callable[[nn.Module, B], R]) -> list[R]:
        with self._model.disable_adapter():
            return self._policy.forward(micro_batches, function)

    def offload(self) -> None:
        """No-op: the weights move with the policy."""

    def reload(self) -> None:
        """No-op: the weights move with the policy."""


class FrozenModel:
    """A model that is never trained, whose weights may stay in host memory."""

    def __init__(self, engine: TrainingEngine, *, offloaded: bool = False) -> None:
        """offloaded: the weights are on the device only while `forward` runs, and in host memory otherwise."""
        self.engine = engine
        self._offloaded = offloaded
        if offloaded:
            self.engine.offload()

    @property
    def shares_prompts(self) -> bool:
        return self.engine.shares_prompts

    def forward(self, micro_batches: Sequence[B], function: Callable[[nn.Module, B], R]) -> list[R]:
        self.engine.reload()
        try:
            return self.engine.forward(micro_batches, function)
        finally:
            if self._offloaded:
                self.engine.offload()

    def offload(self) -> None:
        self.engine.offload()

    def reload(self) -> None:
        if not self._offloaded:
            self.engine.reload()


class FrozenCopy(FrozenModel):
    """A separate causal language model that is never trained."""

    def __init__(
        self,
        folder: Path,
        engine: EngineConfig,
        *,
        offloaded: bool = False,
        wrapper: Callable[[nn.Module], PackedModel] = PolicyModel,
    ) -> None:
        """wrapper: of the model that is passed to `forward`'s function."""
        model = load_causal_model(
            folder, dtype=torch_dtype(engine.dtype), attention=engine.attention, sharding=sharding(engine)
        )
        super().__init__(build_engine(wrapper(model), engine=engine), offloaded=offloaded)
