"""One engine in this process, with the interface of a group of engines: the shipped double of actors.EngineGroup."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rlhf_core.config.training import LoraConfig
from rlhf_core.rollout.engine import RolloutEngine, SamplingParameters
from rlhf_core.rollout.publishing import ProbeAnswer, weights_folder
from rlhf_core.types import Completion


class DiagnosableEngine(RolloutEngine, Protocol):
    def differing_tensors(self, folder: Path) -> list[str]: ...

    def shutdown(self) -> None: ...


class InlineEngines:
    def __init__(self, engine: DiagnosableEngine, lora: LoraConfig | None = None) -> None:
        self._engine = engine
        self._lora = lora
        self._published: bytes | None = None

    def wait_ready(self) -> None:
        """It is: the engine was started by whoever made it."""

    def generate(self, prompts: Sequence[Sequence[int]], parameters: SamplingParameters) -> list[Completion]:
        return self._engine.generate(prompts, parameters)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._engine.logprobs(sequences)

    def publish(self, weights: bytes, version: int) -> None:
        """`weights`: safetensors bytes, of the whole model or, with `lora`, of the adapter."""
        self._published = weights
        with weights_folder(weights, self._lora) as folder:
            self._engine.load_weights(folder, version)

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[ProbeAnswer]:
        return [ProbeAnswer("engine 0", self._engine.weight_version, self._engine.logprobs(sequences))]

    def differing_tensors(self, engine: str) -> list[str]:
        if self._published is None:
            return []
        with weights_folder(self._published, self._lora) as folder:
            return self._engine.differing_tensors(folder)

    def shutdown(self) -> None:
        self._engine.shutdown()
