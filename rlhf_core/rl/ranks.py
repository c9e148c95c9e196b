"""The driver's side of the training ranks: spreads an experience over them, and puts the answers together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf_core.algorithms import Algorithm
from rlhf_core.config.rl import RLConfig
from rlhf_core.losses.aggregation import loss_weights
from rlhf_core.losses.mismatch import measure
from rlhf_core.packing import select
from rlhf_core.rl.experience import Layout
from rlhf_core.rl.kl_controller import KLController, completion_kl
from rlhf_core.rl.roles import CRITIC, POLICY, REFERENCE
from rlhf_core.rl.weights import Source
from rlhf_core.rollout.publication import Publication
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.metrics import mean_over_steps
from rlhf_core.types import Experience, PackedBatch

# Names of RLWorker.score -> the role that gives the score; others are roles themselves.
_ROLE_OF_SCORE = {"old_logprobs": POLICY, "ref_logprobs": REFERENCE, "values": CRITIC}


class PolicyTrainer:
    def __init__(self, config: RLConfig, algorithm: Algorithm, workers: WorkerGroup, seed: int) -> None:
        self._config = config
        self._algorithm = algorithm
        self._workers = workers
        self._seed = seed
        self._kl = KLController(config.settings.kl)

    @property
    def kl_coefficient(self) -> float:
        """Of the step that comes, or is at work."""
        return self._kl.coefficient

    def score(self, experience: Experience) -> Experience:
        """`experience` with what the models say of it.

        Log-probs that are known without a forward are left out: with a single update of a strictly on-policy batch,
        the old log-probs are those of the update itself.
        """
        wanted = self._wanted()
        if not wanted:
            return experience
        return replace(experience, **self._scored(experience, wanted))

    def reward_scores(self, batch: PackedBatch, role: str) -> Tensor:
        """(N,) float32: the raw score of a reward model, by its role, at each token of `batch`."""
        return self._scored(batch, [role])[role]

    def _scored(self, batch: PackedBatch, names: list[str]) -> dict[str, Tensor]:
        """By the names of RLWorker.score. Models whose micro-batches have the same size are asked together."""
        scores: dict[str, Tensor] = {}
        sizes = {name: self._tokens(_ROLE_OF_SCORE.get(name, name)) for name in names}
        for tokens in dict.fromkeys(sizes.values()):
            asked = [name for name in names if sizes[name] == tokens]
            layout = Layout.balanced(batch, ranks=self._workers.size, tokens_per_micro_batch=tokens)
            results = self._workers.scatter("score", layout.split(batch), asked)
            scores |= {name: layout.join(batch, [[part[name] for part in rank] for rank in results]) for name in asked}
        return scores

    def _tokens(self, role: str) -> int:
        return self._config.engine_of(role).tokens_per_micro_batch

    def _wanted(self) -> list[str]:
        settings = self._config.settings
        several_updates = settings.epochs * settings.minibatches > 1
        wanted = {
            "old_logprobs": several_updates or self._algorithm.kl_in_reward,
            "ref_logprobs": self._algorithm.uses_reference,
            "values": self._algorithm.uses_critic,
        }
        return [name for name, needed in wanted.items() if needed]

    def update(self, experience: Experience, step: int) -> dict[str, float]:
        """All optimizer steps on one experience; metrics are means over its trained tokens and over the steps.

        The KL coefficient then adapts to the KL of this experience, unless the policy was frozen.
        """
        settings = self._config.settings
        frozen = settings.critic_settings is not None and step < settings.critic_settings.warmup_steps
        if frozen and experience.old_logprobs is None:
            # No update of the policy will tell how far it is from the engine's.
            experience = replace(experience, **self._scored(experience, ["old_logprobs"]))
        policy, critic = [], []
        for epoch in range(settings.epochs):
            for minibatch in self._minibatches(experience, step * settings.epochs + epoch):
                tokens = minibatch.num_trained_tokens
                if not frozen:
                    shards = self._shards(minibatch, POLICY)
                    updated = self._workers.scatter("update_policy", shards, self.kl_coefficient)[0]
                    policy.append(_per_token(updated, tokens))
                if self._algorithm.uses_critic:
                    shards = self._shards(minibatch, CRITIC)
                    critic.append(_per_token(self._workers.scatter("update_critic", shards)[0], tokens))
        metrics = mean_over_steps(policy) if policy else {}
        for name, value in (mean_over_steps(critic) if critic else {}).items():
            metrics[name if name.startswith("value") else f"critic_{name}"] = value
        return {**metrics, **_mismatch(experience), **self._controlled_kl(experience, adapt=not frozen)}

    def _controlled_kl(self, experience: Experience, *, adapt: bool) -> dict[str, float]:
        if not self._algorithm.uses_reference:
            return {}
        metrics = {"kl_per_completion": completion_kl(experience), "kl_coefficient": self.kl_coefficient}
        if adapt:
            self._kl.update(metrics["kl_per_completion"])
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What the driver knows and the workers do not."""
        return {"kl": self._kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kl.load_state_dict(state["kl"])

    def _minibatches(self, experience: Experience, order: int) -> list[Experience]:
        count = self._config.settings.minibatches
        if count == 1:
            return [self._weighted(experience)]
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + order)
        shuffled = torch.randperm(experience.num_sequences, generator=generator)
        parts = shuffled.tensor_split(min(count, experience.num_sequences))
        return [self._weighted(select(experience, part.tolist())) for part in parts]

    def _weighted(self, minibatch: Experience) -> Experience:
        """With the weight of each token in the loss of one optimizer step, over all ranks."""
        settings = self._config.settings
        weights = loss_weights(
            minibatch.loss_mask, minibatch.sequence_lengths, settings.aggregation,
            length=settings.aggregation_length or self._config.sampling.max_tokens,
        )  # fmt: skip
        return replace(minibatch, loss_weights=weights)

    def _shards(self, minibatch: Experience, role: str) -> list[list[Experience]]:
        layout = Layout.balanced(minibatch, ranks=self._workers.size, tokens_per_micro_batch=self._tokens(role))
        return layout.split(minibatch)

    @contextmanager
    def publication(self, source: Source = "live") -> Iterator[Publication]:
        """The policy's weights (with LoRA: the adapter's) for the engines, as they are now, or their moving average."""
        folder, digests = self._workers.call("write_weights", source)[0]
        try:
            yield Publication(folder, digests, lambda: self._workers.call("read_weights")[0])
        finally:
            self._workers.call("remove_weights")

    def probe(self, batch: PackedBatch, source: Source = "live") -> Sequence[float]:
        """(N,) the trainer's own log-probs of the probe, at temperature 1."""
        logprobs: Tensor = self._workers.call("probe", batch, source)[0]
        return logprobs.tolist()

    def keep_weights(self, source: Source) -> None:
        """The ranks keep a copy of the policy as it is now: the stage's result, unless another is kept later."""
        self._workers.call("keep_weights", source)


def _mismatch(experience: Experience) -> dict[str, float]:
    """How far trainer and engine are apart where old log-probs are known; where not, the one update says it."""
    if experience.old_logprobs is None:
        return {}
    assert experience.rollout_logprobs is not None
    figures = measure(experience.old_logprobs, experience.rollout_logprobs, experience.loss_mask)
    return _per_token({name: float(value) for name, value in figures.items()}, experience.num_trained_tokens)


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
