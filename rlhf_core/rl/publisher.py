"""The trainer's weights go to the engines, and the engines prove that they serve them. Every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rlhf_core.config.rl import RLConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.rl.trainer import PolicyTrainer
from rlhf_core.rollout.publishing import ProvenEngines, default_tolerance, verify_weights
from rlhf_core.training.packing import pack
from rlhf_core.types import Prompt, Trajectory


class PublishedEngines(ProvenEngines, Protocol):
    def publish(self, weights: bytes, version: int) -> None: ...


class Publisher:
    def __init__(
        self, config: RLConfig, trainer: PolicyTrainer, engines: PublishedEngines, probe: Sequence[Prompt]
    ) -> None:
        """probe: prompts whose tokens are scored by both sides; every weight of the model has a say in them."""
        self._trainer = trainer
        self._engines = engines
        self._sequences = [prompt.token_ids for prompt in probe]
        self._batch = pack(self._sequences, [[True] * len(sequence) for sequence in self._sequences])
        self._tolerance = config.probe_tolerance or default_tolerance(config.engine.dtype)
        self._version = 0

    def start(self, version: int) -> None:
        """Both sides were started with the same weights: version 0. A trainer that was restored has later ones, which
        the engines are given. Raises WeightSyncError if they do not serve them."""
        if version:
            self.publish(version)
        else:
            self._verify()

    def publish(self, version: int) -> dict[str, float]:
        """The worst difference on the probe, as a metric. Raises WeightSyncError if it is too large."""
        self._engines.publish(self._trainer.weights(), version)
        self._version = version
        return {"weight_difference": self._verify()}

    def _verify(self) -> float:
        logprobs = torch.tensor(self._trainer.probe(self._batch))
        expected = [part.tolist() for part in logprobs.split(self._batch.sequence_lengths.tolist())]
        return verify_weights(self._engines, self._sequences, expected, self._version, self._tolerance)

    def require_fresh(self, trajectories: Sequence[Trajectory]) -> None:
        """Every trajectory was sampled with the weights that were published last; WeightSyncError names the others."""
        stale = {t.weight_version for t in trajectories} - {self._version}
        if stale:
            raise WeightSyncError(
                f"trajectories were sampled with weights {sorted(stale)}, published is {self._version}"
            )
