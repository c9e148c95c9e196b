"""The driver's side of the training ranks: spreads an experience over them, and puts the answers together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_core.algorithms import Algorithm
from rlhf_core.config.rl import RLConfig
from rlhf_core.rl.experience import Layout
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.packing import select
from rlhf_core.types import Experience, PackedBatch


class PolicyTrainer:
    def __init__(self, config: RLConfig, algorithm: Algorithm, workers: WorkerGroup, seed: int) -> None:
        self._config = config
        self._algorithm = algorithm
        self._workers = workers
        self._seed = seed

    def score(self, experience: Experience) -> Experience:
        """`experience` with what the models say of it.

        Log-probs that are known without a forward are left out: with a single update of a strictly on-policy batch,
        the old log-probs are those of the update itself.
        """
        wanted = self._wanted()
        if not wanted:
            return experience
        return replace(experience, **self._scored(experience, wanted))

    def reward_scores(self, batch: PackedBatch) -> Tensor:
        """(N,) float32: the reward model's raw score at each token of `batch`."""
        return self._scored(batch, ["reward"])["reward"]

    def _scored(self, batch: PackedBatch, wanted: list[str]) -> dict[str, Tensor]:
        layout = self._layout(batch)
        results = self._workers.scatter("score", layout.split(batch), wanted)
        return {name: layout.join(batch, [[part[name] for part in rank] for rank in results]) for name in wanted}

    def _wanted(self) -> list[str]:
        settings = self._config.settings
        several_updates = settings.epochs * settings.minibatches > 1
        wanted = {
            "old_logprobs": several_updates or self._algorithm.kl_in_reward,
            "ref_logprobs": settings.kl.coefficient > 0,
            "values": self._algorithm.uses_critic,
        }
        return [name for name, needed in wanted.items() if needed]

    def update(self, experience: Experience, step: int) -> dict[str, float]:
        """All optimizer steps on one experience; metrics are means over its trained tokens, of the last pass."""
        settings = self._config.settings
        frozen = step < getattr(settings, "critic_warmup_steps", 0)
        metrics: dict[str, float] = {}
        for epoch in range(settings.epochs):
            passes = []
            for minibatch in self._minibatches(experience, step * settings.epochs + epoch):
                passes.append(self._update_once(minibatch, policy_frozen=frozen))
            metrics = {name: sum(p[name] for p in passes) / len(passes) for name in passes[0]}
        return metrics

    def _minibatches(self, experience: Experience, order: int) -> list[Experience]:
        count = self._config.settings.minibatches
        if count == 1:
            return [experience]
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + order)
        shuffled = torch.randperm(experience.num_sequences, generator=generator)
        return [select(experience, part.tolist()) for part in shuffled.chunk(count)]

    def _update_once(self, minibatch: Experience, *, policy_frozen: bool) -> dict[str, float]:
        shards = self._layout(minibatch).split(minibatch)
        tokens = minibatch.num_trained_tokens
        metrics: dict[str, float] = {}
        if not policy_frozen:
            metrics |= _per_token(self._workers.scatter("update_policy", shards, tokens)[0], tokens)
        if self._algorithm.uses_critic:
            critic = _per_token(self._workers.scatter("update_critic", shards, tokens)[0], tokens)
            metrics |= {name if name.startswith("value") else f"critic_{name}": v for name, v in critic.items()}
        return metrics

    def _layout(self, batch: PackedBatch) -> Layout:
        return Layout.balanced(
            batch, ranks=self._workers.size, tokens_per_micro_batch=self._config.engine.tokens_per_micro_batch
        )

    def weights(self) -> bytes:
        """The policy's weights (with LoRA: the adapter's) as safetensors."""
        weights: bytes = self._workers.call("policy_weights")[0]
        return weights

    def probe(self, batch: PackedBatch) -> Sequence[float]:
        """(N,) the trainer's own log-probs of the probe, at temperature 1."""
        logprobs: Tensor = self._workers.call("probe", batch)[0]
        return logprobs.tolist()


def _per_token(metrics: dict[str, float], tokens: int) -> dict[str, float]:
    """Counts and sums over the trained tokens become shares and means; the rest stays as it is."""
    shares = {"clipped_tokens": "clip_fraction", "clipped_values": "value_clip_fraction"}
    per_token = {}
    for name, value in metrics.items():
        if name in shares:
            per_token[shares[name]] = value / tokens
        elif name.endswith("_sum"):
            per_token[name.removesuffix("_sum")] = value / tokens
        else:
            per_token[name] = value
    return per_token
