"""The trainer's weights go to the engines, and the engines prove that they serve them. Every time."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.packing import pack
from rlhf_core.rl.hybrid import Turns
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.weights import WeightSource
from rlhf_core.rollout.engine import RolloutEngine
from rlhf_core.rollout.engines import Engines, hand_over
from rlhf_core.rollout.proof import Expected, Proof, default_tolerance, verify_weights
from rlhf_core.types import Prompt, Trajectory

# Of each prompt, its last: prompts may begin alike, and to score long ones takes as long as an update.
_PROBE_TOKENS = 128


class Publisher:
    """Every publish has a version of its own, one more than the last, whatever weights it carries."""

    def __init__(
        self,
        config: RLConfig,
        trainer: PolicyTrainer,
        engines: Engines,
        probe: Sequence[Prompt],
        turns: Turns,
    ) -> None:
        """probe: prompts whose last tokens both sides score; every weight of the model has a say in them."""
        self._trainer = trainer
        self._engines = engines
        self._turns = turns
        self._max_lag = config.max_lag
        self._sequences = [prompt.token_ids[-_PROBE_TOKENS:] for prompt in probe]
        self._batch = pack(self._sequences, [[True] * len(sequence) for sequence in self._sequences])
        self._tolerance = config.probe_tolerance or default_tolerance(config.engine.dtype)
        self._proven: Expected | None = None  # what the engines serve
        self._source: WeightSource = "live"

    def start(self, version: int) -> None:
        """Both sides were started with the same weights: version 0. A trainer that was restored has later ones, which
        the engines are given as `version`. Raises WeightSyncError if they do not serve them."""
        self._turns.train(keep_weights=True)
        if version:
            self._prove(self._hand_over(version, "live"))
        else:
            expected = Expected(version, self._logprobs("live"), self._trainer.digests())
            self._turns.sample()
            self._prove(expected)
        self._turns.sample()

    def publish(self, source: WeightSource = "live") -> dict[str, float]:
        """Metrics: mean and largest difference on the probe, and how many tensors only the probe can tell of, if any.

        Raises WeightSyncError, naming the tensors, if an engine does not serve them.
        """
        assert self._proven is not None
        self._turns.train()
        proof = self._prove(self._hand_over(self._proven.version + 1, source))
        self._source = source
        self._turns.sample()
        blind = {"tensors_not_read_back": float(len(proof.not_read_back))} if proof.not_read_back else {}
        differences = {
            "weight_difference": proof.difference,
            "largest_weight_difference": proof.max_difference,
        }
        return {**differences, **blind}

    def _hand_over(self, version: int, source: WeightSource) -> Expected:
        with self._trainer.publication(version, source, self._engines.size) as weights:
            logprobs = self._logprobs(source)
            self._turns.publish()
            return Expected(version, logprobs, hand_over(self._engines, weights).digests)

    def _logprobs(self, source: WeightSource) -> list[list[float]]:
        logprobs = torch.tensor(self._trainer.probe(self._batch, source))
        return [part.tolist() for part in logprobs.split(self._batch.sequence_lengths.tolist())]

    def _prove(self, expected: Expected) -> Proof:
        before, self._proven = self._proven, None
        answers = self._engines.call(RolloutEngine.probe, self._sequences)
        proof = verify_weights(answers, expected, self._tolerance, before)
        self._proven = expected
        return proof

    def require_fresh(self, trajectories: Sequence[Trajectory]) -> None:
        """Every trajectory was sampled with the policy's own weights, as they were published last, or at most `max_lag`
        publishes before."""
        if self._source != "live":
            raise WeightSyncError(f"the engines serve the {self._source} of the weights, which nothing is trained on")
        newest = -1 if self._proven is None else self._proven.version
        behind = range(newest - self._max_lag, newest)
        self.require_version({t.weight_version for t in trajectories} - set(behind))

    def require_version(self, versions: Set[int]) -> None:
        """What was sampled was sampled with the weights published last; WeightSyncError names the other versions."""
        version = None if self._proven is None else self._proven.version
        if stale := versions - {version}:
            raise WeightSyncError(f"completions were sampled with weights {sorted(stale)}, published is {version}")
