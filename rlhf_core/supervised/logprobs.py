"""One rank of a model that reads examples and trains nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.stages.logprobs import LogprobsConfig, TopLogprobsConfig
from rlhf_core.contract import StageContext
from rlhf_core.models.distillation import TopModel
from rlhf_core.supervised.referenced import sequence_logprobs
from rlhf_core.training.reference import FrozenCopy
from rlhf_core.types import PackedBatch


class LogprobsWorker:
    def __init__(self, config: LogprobsConfig, context: StageContext, model: ArtifactRef) -> None:
        self._model = FrozenCopy(context.fetch(model).folder, config.engine)

    def logprobs(self, micro_batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return (S,) float32 on CPU for each micro-batch: the sums over the trained tokens of each sequence."""
        return [values.cpu() for values in self._model.forward(micro_batches, sequence_logprobs)]


class TopLogprobsWorker:
    def __init__(self, config: TopLogprobsConfig, context: StageContext, model: ArtifactRef) -> None:
        self._model = FrozenCopy(context.fetch(model).folder, config.engine, wrapper=TopModel)
        self._config = config

    def top(self, micro_batches: Sequence[PackedBatch]) -> list[tuple[Tensor, Tensor]]:
        """Return TopModel's output at the trained tokens of each micro-batch.

        On CPU: (M, k) int32 and (M, k + 1) float32.
        """
        top = self._model.forward(
            micro_batches, lambda model, batch: model(batch, k=self._config.k, temperature=self._config.temperature)
        )
        return [(tokens.int().cpu(), logprobs.cpu()) for tokens, logprobs in top]
