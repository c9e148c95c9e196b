"""One engine, with the interface of a group of engines: what actors.EngineGroup is where there is no Ray."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.rollout.engine import Request, RolloutEngine
from rlhf_core.rollout.proof import ProbeAnswer, answer_probe
from rlhf_core.rollout.publication import Publication
from rlhf_core.types import Completion


class InlineEngines:
    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        return self._engine.generate(requests, keep_prefixes=keep_prefixes)

    def forget(self) -> None:
        self._engine.forget()

    def each(self) -> list[RolloutEngine]:
        return [self._engine]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._engine.logprobs(sequences)

    def publish(self, weights: Publication, version: int) -> None:
        self._engine.load_weights(weights.folder, version)

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[ProbeAnswer]:
        return [answer_probe("engine 0", self._engine, sequences)]

    def sleep(self, *, keep_weights: bool) -> None:
        self._engine.sleep(keep_weights=keep_weights)

    def wake(self) -> None:
        self._engine.wake()

    def shutdown(self) -> None:
        self._engine.shutdown()
