"""Distillation on one rank: a student, and a frozen teacher or its stored log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import assert_never

from torch import Tensor, nn

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.stages.distillation import DistillationConfig
from rlhf_core.contract import StageContext
from rlhf_core.losses.divergence import forward_kl, jensen_shannon, reverse_kl, top_forward_kl
from rlhf_core.losses.masking import masked_sum
from rlhf_core.losses.supervised import next_token_loss
from rlhf_core.metrics import LossAndMetrics, Sum
from rlhf_core.models.distillation import StudentModel, Taught, TeacherModel, by_teacher
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.policy import PolicyWorker
from rlhf_core.training.randomness import seed_rank
from rlhf_core.training.reference import FrozenCopy
from rlhf_core.types import PackedBatch, TaughtBatch


class DistillationWorker(PolicyWorker[DistillationConfig]):
    wrapper = StudentModel

    def __init__(
        self,
        config: DistillationConfig,
        context: StageContext,
        model: ArtifactRef,
        total_steps: int,
        teacher: ArtifactRef | None,
        temperature: float,
    ) -> None:
        """teacher: None: the batches have its log-probs; temperature: of both distributions."""
        super().__init__(config, context, model, total_steps)
        self._temperature = temperature
        self._teacher = self._head = None
        if teacher is not None:
            folder = context.fetch(teacher).folder
            self._teacher = FrozenCopy(folder, config.teacher_engine, wrapper=TeacherModel)
            assert isinstance(self._teacher.engine.module, TeacherModel)
            self._head = self._teacher.engine.module.head
        seed_rank(context.seed)

    def prepared(self, shard: Shard) -> Shard:
        """Add the teacher's hidden states, in host memory: its logits would be a vocabulary wide.

        The teacher reads the student's micro-batches: packed differently it would round differently.
        """
        if self._teacher is None:
            return shard
        hidden_states = self._teacher.forward(shard.micro_batches, lambda model, batch: model(batch).cpu())
        taught: list[PackedBatch] = [
            TaughtBatch(**vars(batch), teacher_hidden=hidden)
            for batch, hidden in zip(shard.micro_batches, hidden_states, strict=True)
        ]
        return replace(shard, micro_batches=taught)

    def loss(
        self, model: nn.Module, batch: TaughtBatch, shard: Shard, step_routing: Tensor | None = None
    ) -> LossAndMetrics:
        logprobs, divergences, routing = model(
            batch, only=batch.loss_mask, taught=self._taught(batch), with_routing=step_routing is not None
        )
        divergence = masked_sum(divergences, batch.loss_mask) / shard.num_tokens
        cross_entropy = next_token_loss(logprobs, batch.loss_mask, num_tokens=shard.num_tokens)
        loss = self._temperature**2 * divergence + self.config.cross_entropy_coefficient * cross_entropy
        metrics = {"divergence": Sum(divergence.detach()), "cross_entropy": Sum(cross_entropy.detach())}
        return self.balanced(loss, metrics, routing, step_routing)

    def _taught(self, batch: TaughtBatch) -> Taught:
        if self._head is not None:
            assert batch.teacher_hidden is not None
            return by_teacher(self._divergence, self._head, batch.teacher_hidden, self._temperature)
        assert batch.top_tokens is not None
        assert batch.top_logprobs is not None
        model = self.engine.module
        assert isinstance(model, StudentModel)
        stored = batch.top_tokens[batch.loss_mask], batch.top_logprobs[batch.loss_mask]
        return Taught(tuple(map(model.own_rows, stored)), _top_divergence, self._temperature)

    @property
    def _divergence(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        match self.config.divergence:
            case "forward_kl":
                return forward_kl
            case "reverse_kl":
                return reverse_kl
            case "jensen_shannon":
                return partial(jensen_shannon, weight=self.config.teacher_weight)
            case other:
                assert_never(other)


def _top_divergence(student: Tensor, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    return top_forward_kl(student, tokens.long(), logprobs.to(student.dtype))
