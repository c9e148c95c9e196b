"""One engine in this process, with the interface of a group of engines: the shipped double of actors.EngineGroup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlhf_core.config.training import LoraConfig
from rlhf_core.rollout.engine import RolloutEngine, SamplingParameters
from rlhf_core.rollout.publishing import ProbeAnswer, weights_folder
from rlhf_core.types import Completion


class ProvenEngine(RolloutEngine, Protocol):
    @property
    def differing_tensors(self) -> tuple[str, ...]: ...

    def shutdown(self) -> None: ...


class InlineEngines:
    def __init__(self, engine: ProvenEngine, lora: LoraConfig | None = None) -> None:
        self._engine = engine
        self._lora = lora

    def wait_ready(self) -> None:
        """It is: the engine was started by whoever made it."""

    def generate(self, prompts: Sequence[Sequence[int]], parameters: SamplingParameters) -> list[Completion]:
        return self._engine.generate(prompts, parameters)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._engine.logprobs(sequences)

    def publish(self, weights: bytes, version: int) -> None:
        """`weights`: safetensors bytes, of the whole model or, with `lora`, of the adapter."""
        with weights_folder(weights, self._lora) as folder:
            self._engine.load_weights(folder, version)

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[ProbeAnswer]:
        engine = self._engine
        return [ProbeAnswer("engine 0", engine.weight_version, engine.logprobs(sequences), engine.differing_tensors)]

    def shutdown(self) -> None:
        self._engine.shutdown()
