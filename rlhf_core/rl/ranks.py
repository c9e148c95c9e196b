"""The driver's side of the training ranks: divides batches among them and joins their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rlhf_core.algorithms import Algorithm
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import StageContext
from rlhf_core.division import Division
from rlhf_core.losses import kl, mismatch
from rlhf_core.losses.aggregation import loss_weights
from rlhf_core.metrics import merged
from rlhf_core.packing import plain, select
from rlhf_core.rl.critic import TrainsCritic
from rlhf_core.rl.kl_controller import KLController
from rlhf_core.rl.roles import CRITIC, POLICY, REFERENCE, TEACHER
from rlhf_core.rl.scoring import Scores, joined, role_of, scored
from rlhf_core.rl.shards import Shards
from rlhf_core.rl.weights import WeightSource
from rlhf_core.rl.worker import RLWorker
from rlhf_core.rollout.publication import Digests, Publication
from rlhf_core.rollout.transport.folder import Files
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.metrics import StepMetrics, of_batch, over_steps
from rlhf_core.training.randomness import derived_seed
from rlhf_core.training.saving import save
from rlhf_core.types import LoggedBatch, Minibatch, PackedBatch, Rollouts, Scored, TrainingBatch

B = TypeVar("B", bound=PackedBatch)


class Updated(NamedTuple):
    metrics: dict[str, float]
    # `old_logprobs` and `entropies`, if they are logged and were not in the batch; (N,) float32, NaN where masked.
    before: dict[str, Any]


class PolicyTrainer:
    def __init__(
        self,
        config: RLConfig,
        algorithm: Algorithm,
        workers: WorkerGroup[RLWorker],
        seed: int,
        apart: Mapping[str, WorkerGroup[Any]] = MappingProxyType({}),
    ) -> None:
        """apart: the ranks of the models that are not on the policy's, by role."""
        self._config = config
        self._algorithm = algorithm
        self._workers = workers
        self._apart = apart
        self._critics: WorkerGroup[TrainsCritic] = apart.get(CRITIC, workers)
        self._seed = seed
        self._kl = KLController(config.settings.kl)
        self._sharing: dict[str, bool] = {}  # by role, cached

    @property
    def kl_coefficient(self) -> float:
        """The KL coefficient of the current step, or between steps of the next one."""
        return self._kl.coefficient

    def score(self, rollouts: Rollouts, hinted: PackedBatch | None = None, logged: Tensor | None = None) -> Scored:
        """Return `rollouts` with the log-probs and values of the models.

        hinted: the same sampled tokens after the teacher's hinted prompts, if there are hints. logged: (N,) bool, the
        tokens whose entropies are wanted where the old log-probs are computed.

        Log-probs that need no forward are omitted: with a single update of a strictly on-policy batch, the old
        log-probs are those of the update itself.
        """
        fields = self._fields_to_score()
        if hinted is None:
            return Scored(**vars(rollouts), **self._scored(rollouts, fields, logged))
        by_teacher = self._scored(hinted, ["teacher_logprobs"])["teacher_logprobs"][hinted.loss_mask]
        others = self._scored(rollouts, [name for name in fields if name != "teacher_logprobs"], logged)
        teacher_logprobs = torch.zeros(rollouts.num_tokens).masked_scatter(rollouts.loss_mask, by_teacher)
        return Scored(**vars(rollouts), **others, teacher_logprobs=teacher_logprobs)

    def reward_scores(self, batch: PackedBatch, role: str) -> Tensor:
        """Return the raw score of the reward model of `role` at each token of `batch`, (N,) float32."""
        scores: Tensor = self._scored(batch, [role])[role]
        return scores

    def _scored(self, batch: PackedBatch, names: list[str], logged: Tensor | None = None) -> dict[str, Any]:
        """Return the tensors of Scores.score. Models on the same ranks with micro-batches of the
        same size are scored in one call."""
        scores: dict[str, Any] = {}
        read = plain(batch)
        shards = Shards(read if logged is None else LoggedBatch(**vars(read), logged=logged), self._workers)
        calls: dict[tuple[str, int, bool], list[str]] = {}
        for name in names:
            role = role_of(name)
            ranks = role if role in self._apart else POLICY
            calls.setdefault((ranks, self._micro_batch_tokens(role), self._shares_prompts(role)), []).append(name)
        for (ranks, _, _), names_of_call in calls.items():
            role = role_of(names_of_call[0])
            group: WorkerGroup[Scores] = self._apart.get(ranks, self._workers)
            # Rounding depends on the content of a micro-batch: models compared with the policy use the same ones.
            replicas = self._workers.replicas if role in (REFERENCE, TEACHER) else group.replicas
            division = self._division(shards.batch, role, replicas).over(group.replicas)
            scores |= scored(group, division, names_of_call, shards.of(division))
        return scores

    def _division(self, batch: B, role: str, replicas: int) -> Division[B]:
        return Division.of(
            batch, replicas=replicas, tokens_per_micro_batch=self._micro_batch_tokens(role),
            shares_prompts=self._shares_prompts(role),
        )  # fmt: skip

    def _micro_batch_tokens(self, role: str) -> int:
        """Return the tokens of a micro-batch: by default as for the policy, wherever the role's model is placed."""
        return self._config.engine_of(role).micro_batch_tokens(self._config.placement)

    def _shares_prompts(self, role: str) -> bool:
        """Return whether micro-batches of `role` share prompts; a model compared with the policy uses the policy's."""
        if role in (REFERENCE, TEACHER):
            role = POLICY
        if role not in self._sharing:
            group: WorkerGroup[Scores] = self._apart.get(role, self._workers)
            self._sharing[role] = group.call(Scores.shares_prompts, role)[0]
        return self._sharing[role]

    def _fields_to_score(self) -> list[str]:
        settings = self._config.settings
        several_updates = settings.epochs * settings.minibatches > 1
        needed = {
            "old_logprobs": several_updates or self._algorithm.kl_in_reward or self._algorithm.uses_teacher,
            "ref_logprobs": self._algorithm.uses_reference,
            "teacher_logprobs": self._algorithm.uses_teacher,
            "values": self._algorithm.uses_critic,
        }
        return [name for name, is_needed in needed.items() if is_needed]

    def update(self, batch: TrainingBatch, step: int, logged: Tensor | None = None) -> Updated:
        """Run all optimizer steps on one batch.

        logged: as in `score`. Metrics are means over the trained tokens and the steps, and `trained_completions`, the
        number of episodes with a trained token. A minibatch without trained tokens is skipped.

        The KL coefficient then adapts to the KL of this batch, unless the policy was frozen.
        """
        trained = {"trained_completions": float(batch.episode_ids[batch.loss_mask].unique().numel())}
        if not batch.num_trained_tokens:
            return Updated(trained, {})
        settings = self._config.settings
        frozen = settings.critic_settings is not None and step < settings.critic_settings.warmup_steps
        before: dict[str, Any] = {}
        if frozen and batch.old_logprobs is None:
            # No policy update will measure the mismatch of its log-probs with the engine's.
            before = self._scored(batch, ["old_logprobs"], logged)
            batch = replace(batch, **before)
        policy: list[StepMetrics] = []
        critic: list[StepMetrics] = []
        for epoch in range(settings.epochs):
            for minibatch in self._minibatches(batch, step * settings.epochs + epoch, logged):
                if not minibatch.num_trained_tokens:
                    continue
                shards = Shards(minibatch, self._workers)
                if not frozen:
                    division = self._division(minibatch, POLICY, self._workers.replicas)
                    updates = self._workers.scatter(RLWorker.update_policy, shards.of(division), self.kl_coefficient)
                    policy.append(updates[0].metrics)
                    if minibatch.logged is not None:
                        before = joined(division, [update.before for update in updates])
                if self._algorithm.uses_critic:
                    of_critic = shards.of(self._division(minibatch, CRITIC, self._critics.replicas))
                    critic.append(self._critics.scatter(TrainsCritic.update_critic, of_critic)[0])
        updated = merged(
            over_steps(policy) if policy else {},
            over_steps(critic, prefix="critic_") if critic else {},
            _old_logprob_metrics(batch),
            trained,
        )
        known = {name: values.where(batch.loss_mask, torch.nan) for name, values in before.items()}
        return Updated(merged(updated, self._controlled_kl(batch, updated, adapt=not frozen)), known)

    def _controlled_kl(self, batch: TrainingBatch, updated: Mapping[str, float], *, adapt: bool) -> dict[str, float]:
        if not self._algorithm.uses_reference:
            return {}
        kl_per_completion = updated["kl"] * batch.num_trained_tokens / updated["trained_completions"]
        metrics = {"kl_per_completion": kl_per_completion, "kl_coefficient": self.kl_coefficient}
        if adapt:
            self._kl.update(kl_per_completion)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's state that is not in the workers."""
        return {"kl": self._kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kl.load_state_dict(state["kl"])

    def _minibatches(self, batch: TrainingBatch, order: int, logged: Tensor | None = None) -> list[Minibatch]:
        count = self._config.settings.minibatches
        if count == 1:
            # Only a single update has its log-probs from its own forward.
            return [replace(self._weighted(batch), logged=logged if batch.old_logprobs is None else None)]
        generator = torch.Generator().manual_seed(derived_seed(self._seed, f"minibatches {order}"))
        sequence_counts = batch.episodes.bincount().tolist()  # by episode, whose sequences stay together
        sequences = torch.arange(batch.num_sequences).split(sequence_counts)
        shuffled = torch.randperm(len(sequence_counts), generator=generator)
        parts = [
            torch.cat([sequences[i] for i in part.tolist()])
            for part in shuffled.tensor_split(min(count, len(sequence_counts)))
        ]
        return [self._weighted(select(batch, part.tolist())) for part in parts]

    def _weighted(self, batch: TrainingBatch) -> Minibatch:
        """Return `batch` with the weight of each token in the loss of one optimizer step, over all replicas."""
        settings = self._config.settings
        weights_of = partial(
            loss_weights, sequence_lengths=batch.episode_lengths, kind=settings.aggregation,
            length=settings.aggregation_length or self._config.max_sampled_tokens,
        )  # fmt: skip
        mask, imitated = batch.loss_mask, batch.imitated
        imitation = None if imitated is None else weights_of(imitated & mask)
        return Minibatch(**vars(batch), loss_weights=weights_of(mask), imitation_weights=imitation)

    @contextmanager
    def publication(self, version: int, source: WeightSource = "live", engines: int = 1) -> Iterator[Publication]:
        """Yield the publication of the policy (or its adapter), current or averaged, for `engines` engines."""
        offered = self._workers.call(RLWorker.offer_weights, version, engines)[0]
        assert offered is not None  # on rank 0
        transport, manifest = offered
        if transport.concurrent:
            start = partial(self._workers.begin, RLWorker.send_weights, source, transport, manifest)
            # Not in a `finally`: after an error, ranks in the broadcast accept no call until it times out.
            yield Publication(transport, manifest, self._read_weights, start)
            self._workers.call(RLWorker.withdraw_weights)
            return
        try:
            digests = self._workers.call(RLWorker.send_weights, source, transport, manifest)[0]
            yield Publication(transport, replace(manifest, digests=digests), self._read_weights)
        finally:
            self._workers.call(RLWorker.withdraw_weights)

    def digests(self) -> Digests:
        """Return the digests of the weights to serve, by tensor name."""
        return self._workers.call(RLWorker.digest_weights)[0]

    def _read_weights(self) -> Files:
        return self._workers.call(RLWorker.read_weights)[0]

    def probe(self, batch: PackedBatch, source: WeightSource = "live") -> Sequence[float]:
        """Return the trainer's log-probs of the probe at temperature 1, (N,)."""
        logprobs: list[float] = self._workers.call(RLWorker.probe, batch, source)[0].tolist()
        return logprobs

    def keep_weights(self, source: WeightSource) -> None:
        """Keep a copy of the policy on the ranks: the stage's result, unless another copy is kept later."""
        self._workers.call(RLWorker.keep_weights, source)

    def save(self, folder: Path, context: StageContext, *, current: bool = False) -> None:
        """Write the stage's result, or the `current` policy, to `folder` in the job's working folder."""
        save(self._workers, folder, context, RLWorker.save_current if current else None)
        critic = self._config.settings.critic_settings
        if not current and critic is not None and critic.save and CRITIC in self._apart:
            save(self._apart[CRITIC], folder / "critic", context)


def _old_logprob_metrics(scored: Scored) -> dict[str, float]:
    """Return the mismatch with the engine and the KL to reference and teacher, if old log-probs are known; otherwise
    the single update measures them."""
    old = scored.old_logprobs
    if old is None:
        return {}
    metrics = mismatch.measure(old, scored.rollout_logprobs, scored.loss_mask)
    if scored.ref_logprobs is not None:
        metrics |= kl.measure(old, scored.ref_logprobs, scored.loss_mask)
    if scored.teacher_logprobs is not None:
        (to_teacher,) = kl.measure(old, scored.teacher_logprobs, scored.loss_mask).values()
        metrics["teacher_kl"] = to_teacher
    return of_batch(metrics, scored.num_trained_tokens)
