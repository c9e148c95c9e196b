"""Publishing of the trainer's weights to the engines. Every publish is verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.errors import ActorDiedError, WeightSyncError
from rlhf_core.packing import pack
from rlhf_core.rl.hybrid import Turns
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.weights import WeightSource
from rlhf_core.rollout.engine import RolloutEngine
from rlhf_core.rollout.engines import Engines, hand_over
from rlhf_core.rollout.proof import Expected, Proof, default_tolerance, verify_weights
from rlhf_core.types import Prompt, Trajectory

# The last tokens of each prompt: prompts may share a prefix, and scoring long ones takes as long as an update.
_PROBE_TOKENS = 128


class Publisher:
    """Publishes weights. Each publish increments the version, whatever its source."""

    def __init__(
        self,
        config: RLConfig,
        trainer: PolicyTrainer,
        engines: Engines,
        probe: Sequence[Prompt],
        turns: Turns,
        replace_dead: Callable[[], list[str]] | None = None,
    ) -> None:
        """probe: prompts whose last tokens both sides score; their log-probs depend on every weight of the model.
        replace_dead: as that of the engines, for those that a stream calls; none: the engines' own.
        """
        self._trainer = trainer
        self._engines = engines
        self._turns = turns
        self._replace_dead_engines = replace_dead or engines.replace_dead
        self._max_age, self._hybrid = config.max_age, config.hybrid
        self._sequences = [prompt.token_ids[-_PROBE_TOKENS:] for prompt in probe]
        self._batch = pack(self._sequences, [[True] * len(sequence) for sequence in self._sequences])
        self._tolerance = config.probe_tolerance or default_tolerance(config.engine.dtype)
        self._proven: Expected | None = None  # the weights that the engines serve
        self._source: WeightSource = "live"

    def start(self, version: int) -> None:
        """Verify the engines' initial weights, or publish those of a restored trainer as `version`.

        Both sides start with the same weights, version 0. Raises WeightSyncError if an engine does not serve them.
        """
        self._turns.train(keep_weights=True)
        if version:
            self._prove(self._hand_over(version, "live"))
        else:
            expected = Expected(version, self._logprobs("live"), self._trainer.digests())
            self._turns.sample()
            self._prove(expected)
        self._turns.sample()

    def replace_dead(self) -> list[str]:
        """Restart the engines that have died, publish the same version again, and verify that all engines serve it.

        Returns the names of the new ones; empty if none has died, or none can be restarted.
        """
        assert self._proven is not None
        version, names = self._proven.version, self._replace_dead_engines()
        if names and version:
            self._turns.train()
            self._prove(self._hand_over(version, self._source))
            self._turns.sample()
        elif names:  # version 0 is what an engine starts with
            self.start(0)
        return names

    def publish(self, source: WeightSource = "live") -> dict[str, float]:
        """Publish the weights, verify that the engines serve them, and return metrics.

        An engine that dies meanwhile is restarted, unless it shares a device with a rank.
        Metrics: mean and largest difference on the probe, and the number of tensors that only the probe covers, if any.
        Raises WeightSyncError, naming the tensors, if an engine does not serve them.
        """
        assert self._proven is not None
        self._turns.train()
        version = self._proven.version + 1
        try:
            proof = self._prove(self._hand_over(version, source))
        except ActorDiedError as error:
            if self._hybrid or not (names := self._replace_dead_engines()):
                raise
            print(f"{error}; {', '.join(names)} restarted, version {version} is published again", flush=True)
            proof = self._prove(self._hand_over(version, source))
        self._source = source
        self._turns.sample()
        not_read_back = {"tensors_not_read_back": float(len(proof.not_read_back))} if proof.not_read_back else {}
        differences = {
            "weight_difference": proof.difference,
            "largest_weight_difference": proof.max_difference,
        }
        return {**differences, **not_read_back}

    def _hand_over(self, version: int, source: WeightSource) -> Expected:
        with self._trainer.publication(version, source, self._engines.size) as weights:
            logprobs = self._logprobs(source)
            self._turns.publish()
            digests = hand_over(self._engines, weights).digests
        self._turns.serve()
        return Expected(version, logprobs, digests)

    def _logprobs(self, source: WeightSource) -> list[list[float]]:
        logprobs = torch.tensor(self._trainer.probe(self._batch, source))
        return [part.tolist() for part in logprobs.split(self._batch.sequence_lengths.tolist())]

    def _prove(self, expected: Expected) -> Proof:
        previous, self._proven = self._proven, None
        probes = self._engines.call(RolloutEngine.probe, self._sequences)
        proof = verify_weights(probes, expected, self._tolerance, previous)
        self._proven = expected
        return proof

    def require_fresh(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise WeightSyncError unless all trajectories were sampled with the policy's live weights, published last or
        at most `max_age` publishes before."""
        if self._source != "live":
            raise WeightSyncError(f"the engines serve the {self._source} of the weights, which nothing is trained on")
        newest = -1 if self._proven is None else self._proven.version
        behind = range(newest - self._max_age, newest)
        self.require_version({t.weight_version for t in trajectories} - set(behind))

    def require_version(self, versions: Set[int]) -> None:
        """Raise WeightSyncError, naming the others, unless `versions` has only the version published last."""
        version = None if self._proven is None else self._proven.version
        if stale := versions - {version}:
            raise WeightSyncError(f"completions were sampled with weights {sorted(stale)}, published is {version}")
