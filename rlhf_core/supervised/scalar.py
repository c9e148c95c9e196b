"""One rank that trains a model with one score a token, with any loss."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from rlhf_core.errors import StageError
from rlhf_core.metrics import LossAndMetrics, Metric, Sum, merged
from rlhf_core.models.folders.targets import head_problems
from rlhf_core.models.loading import load_scalar_model, torch_dtype
from rlhf_core.models.logprobs import chunked_logprobs
from rlhf_core.models.output_head import OutputHead, backbone
from rlhf_core.models.packed import Classifier, in_trained_example
from rlhf_core.models.routing import experts_per_token
from rlhf_core.models.shift import before, predicted_places
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.worker import C, SupervisedWorker
from rlhf_core.training.build import sharding
from rlhf_core.types import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Sums over the rewards of a validation set.
_COUNT, _SUM, _SQUARES = "rewards", "reward_sum", "reward_squares"
_LEAST_VARIANCE = 1e-12  # of rewards, relative to their mean square: less is rounding


class RewardModel(Classifier):
    """A scalar model that can also compute log-probs of tokens, if its embeddings are tied to a language head."""

    def __init__(self, model: nn.Module, *, language: bool) -> None:
        """model: a PreTrainedModel with a `score` head of one output, or a PeftModel of one.

        Raises StageError if `language` is set and the embeddings are not tied.
        """
        super().__init__(model)
        self.language_model = tied_language_model(self._transformer) if language else None

    def forward(
        self, batch: PackedBatch, *, only: Tensor | None = None, with_routing: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return scores (N,) float32 at each token; (N,) float32 log-probs of the trained tokens (0 elsewhere) or None;
        and `routing_sums` (2, E) of the experts, over the sequences of each trained example, or None.

        only: (N,) bool, the trained tokens whose log-probs are computed.
        """
        routing = None
        if with_routing:
            hidden, routing = self._routed(batch, in_trained_example(batch, sequences=batch.sequences_per_example))
        else:
            hidden = self._hidden(batch)
        scores = hidden.of_each(self._scores)
        if self.language_model is None:
            return scores, None, routing
        computed = batch.loss_mask if only is None else batch.loss_mask & only
        predicted = predicted_places(batch, computed)
        places = self.own_rows(predicted)
        logprobs, _ = chunked_logprobs(
            OutputHead(self.language_model), hidden.dealt(before(predicted)), batch.input_ids[places],
            vocabulary=self._transformer.config.get_text_config().vocab_size,
        )  # fmt: skip
        return scores, self._of_batch(logprobs, places, batch), routing


def tied_language_model(classifier: Any) -> PreTrainedModel:
    """Return the causal language model of `classifier`, for an OutputHead: without the layers, which the classifier
    has.

    A classifier has no language head; if that was tied, the embedding matrix is that head, so it still exists.
    """
    config = classifier.config
    for problem in head_problems(tied=config.tie_word_embeddings):
        raise StageError(f"language_model_coefficient: {problem}")
    with torch.device("meta"):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    setattr(model, model.base_model_prefix, backbone(classifier))
    model.tie_weights()
    if lost := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise StageError(
            f"language_model_coefficient: the language head of {type(model).__name__} has weights that "
            f"are lost when the reward model is made ({', '.join(lost)}); set the coefficient to 0"
        )
    setattr(model, model.base_model_prefix, nn.Identity())  # DeepSpeed hooks into a module once for each name of it
    return model


class ScalarWorker(SupervisedWorker[C]):
    @property
    def language(self) -> bool:
        """True if the loss needs log-probs too."""
        return False

    def build_model(self) -> nn.Module:
        config = self.config
        model = load_scalar_model(
            self.folder,
            dtype=torch_dtype(config.engine.dtype),
            attention=config.engine.attention,
            lora=config.adapter,
            gradient_checkpointing=config.engine.gradient_checkpointing,
            seed=self.seed,
            freeze_vision=config.engine.freeze_vision,
            sharding=sharding(config.engine),
        )
        if config.moe_coefficient > 0:
            experts_per_token(model)
        return RewardModel(model, language=self.language)

    @abstractmethod
    def judged(
        self, model: nn.Module, batch: Any, shard: Shard, step_routing: Tensor | None = None
    ) -> tuple[Tensor, Mapping[str, Metric], Tensor]:
        """Return as `loss`, with the rewards that it uses, of any shape, from the same forward."""

    def loss(self, model: nn.Module, batch: Any, shard: Shard, step_routing: Tensor | None = None) -> LossAndMetrics:
        loss, metrics, _ = self.judged(model, batch, shard, step_routing)
        return loss, metrics

    def measured(self, model: nn.Module, batch: Any, shard: Shard) -> Mapping[str, Metric]:
        """Add the sums from which `validate` computes exact metrics."""
        _, metrics, rewards = self.judged(model, batch, shard)
        exact = rewards.detach().double()
        sums = {_COUNT: torch.ones_like(exact).sum(), _SUM: exact.sum(), _SQUARES: exact.square().sum()}
        return merged(metrics, {name: Sum(value) for name, value in sums.items()})

    def validate(self, shard: Shard) -> dict[str, float]:
        """Return also the mean and standard deviation of all rewards.

        The deviation is 0 below the resolution of float32.
        """
        measured = super().validate(shard)
        count, total, squares = (measured.pop(name) for name in (_COUNT, _SUM, _SQUARES))
        mean, square = total / count, squares / count
        variance = square - mean**2
        std = 0.0 if variance <= _LEAST_VARIANCE * square else math.sqrt(variance)
        return {**measured, "reward_mean": mean, "reward_std": std}
