"""A group of rollout engines with the same weights, as its users see it: actors.EngineGroup, InlineEngines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rlhf_core.rollout.engine import Request
from rlhf_core.rollout.proof import ProbeAnswer
from rlhf_core.rollout.publication import Publication
from rlhf_core.types import Completion


class Advancing(Protocol):
    def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
        """As of rollout.engine.RolloutEngine."""


class Sampler(Protocol):
    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        """The completion of each request, in their order, whichever engine serves it; as of one engine."""

    def forget(self) -> None:
        """Of every engine; as of one."""

    def each(self) -> Sequence[Advancing]:
        """Its engines, one by one."""


class Engines(Sampler, Protocol):
    def publish(self, weights: Publication, version: int) -> None:
        """Every engine serves `weights` as `version` from now on; proof.verify_weights checks that it does."""

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[ProbeAnswer]:
        """Of every engine: its log-probs of all `sequences` at temperature 1, and the tensors that it serves."""


class SleepingEngines(Engines, Protocol):
    """Engines that can release their devices."""

    def sleep(self, *, keep_weights: bool) -> None: ...

    def wake(self) -> None: ...
