"""A reward model from preference pairs: the last token of a completion is where its reward is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from rlhf_core.config.stages import RewardModelConfig, held_out_pairs
from rlhf_core.data.chat import stop_token_ids
from rlhf_core.data.fitting import Row
from rlhf_core.data.formats.preferences import by_prompt
from rlhf_core.errors import StageError
from rlhf_core.losses.ranking import pairwise_loss
from rlhf_core.losses.supervised import next_token_loss
from rlhf_core.metrics import LossAndMetrics, Metric, Sum, merged
from rlhf_core.models.folder import update_json
from rlhf_core.models.loading import load_scalar_model, torch_dtype
from rlhf_core.models.logprobs import chunked_logprobs
from rlhf_core.models.output_head import OutputHead, backbone
from rlhf_core.models.packed import Classifier, in_trained_example
from rlhf_core.models.routing import experts_per_token
from rlhf_core.models.targets import head_problems
from rlhf_core.supervised.examples import Example, Shard, divide
from rlhf_core.supervised.loop import shuffled
from rlhf_core.supervised.pairs import pack_pairs, pair_example
from rlhf_core.supervised.worker import SupervisedWorker
from rlhf_core.training.group import WorkerGroup
from rlhf_core.types import PackedBatch, PreferenceBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Sums over the pairs of a validation set.
_CORRECT, _SUM, _SQUARES = "correct", "reward_sum", "reward_squares"
_LEAST_VARIANCE = 1e-12  # of rewards, relative to their mean square: less is rounding


def split_by_prompt(rows: Sequence[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Pairs to train on, and 5 % held out (at least one pair, at most 2000), whose prompts occur in no trained pair.

    Raises StageError if all pairs have the same prompt, so that none could be held out.
    """
    groups = list(by_prompt(rows).values())
    if len(groups) < 2:
        raise StageError(
            "the pairs have fewer than two different prompts, so none can be held out to judge the model by"
        )
    target = held_out_pairs(len(rows))
    held_out: list[Row] = []
    trained: list[Row] = []
    order = shuffled(len(groups), seed=seed, name="held out")
    for index in order[:-1]:
        (held_out if len(held_out) < target else trained).extend(groups[index])
    return trained + groups[order[-1]], held_out


def judged_pair(tokenizer: PreTrainedTokenizerFast, row: Row) -> Example:
    """A pair of whose tokens those of the chosen completion alone are trained, by the language modelling term; the
    rewards of both are read at their last tokens."""
    pair = pair_example(tokenizer, row)
    return replace(pair, masks=(pair.masks[0], [False] * len(pair.masks[1])))


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
        """Scores (N,) float32 at each token; (N,) float32 log-probs of the trained tokens (0 elsewhere) or None; and
        `routing_sums` (2, E) of the experts, over both completions of each trained pair, or None.

        only: (N,) bool, the trained tokens whose log-probs are computed.
        """
        routing = None
        if with_routing:
            hidden, routing = self._routed(batch, in_trained_example(batch, sequences=2))
        else:
            hidden = self._hidden(batch)
        scores = self._scores(hidden)
        if self.language_model is None:
            return scores, None, routing
        computed = batch.loss_mask if only is None else batch.loss_mask & only
        places = (computed & (batch.position_ids != 0)).nonzero().squeeze(-1)
        logprobs, _ = chunked_logprobs(
            OutputHead(self.language_model), hidden[places - 1], batch.input_ids[places],
            vocabulary=self._transformer.config.get_text_config().vocab_size,
        )  # fmt: skip
        return scores, logprobs.new_zeros(batch.num_tokens).index_put((places,), logprobs), routing


def tied_language_model(classifier: Any) -> PreTrainedModel:
    """The causal language model of `classifier`, for an OutputHead: without the layers, which the classifier has.

    A classifier has no language head; where it was tied, the embedding matrix is that head, so it is still there.
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


class RewardModelWorker(SupervisedWorker[RewardModelConfig]):
    """Trains the pairwise loss and, if configured, language modelling of chosen completions."""

    def build_model(self) -> nn.Module:
        config = self.config
        model = load_scalar_model(
            self.folder,
            dtype=torch_dtype(config.engine.dtype),
            attention=config.engine.attention,
            lora=config.lora,
            gradient_checkpointing=config.engine.gradient_checkpointing,
            seed=self.seed,
        )
        if config.moe_coefficient > 0:
            experts_per_token(model)
        return RewardModel(model, language=config.language_model_coefficient > 0)

    def loss(
        self, model: nn.Module, batch: PreferenceBatch, shard: Shard, step_routing: Tensor | None = None
    ) -> LossAndMetrics:
        """step_routing: of the experts over the whole step; with it, the load of the micro-batch is balanced too."""
        loss, metrics, _ = self._judged(model, batch, shard, step_routing)
        return loss, metrics

    def _judged(
        self, model: nn.Module, batch: PreferenceBatch, shard: Shard, step_routing: Tensor | None = None
    ) -> tuple[Tensor, Mapping[str, Metric], Tensor]:
        """Loss, metrics, and (P, 2) the rewards of both completions of each pair, of one forward."""
        config = self.config
        scores, logprobs, routing = model(batch, with_routing=step_routing is not None)
        chosen, rejected, real = _rewards(scores, batch)
        assert batch.margins is not None
        loss, metrics = pairwise_loss(
            chosen[real], rejected[real], batch.margins[real],
            num_pairs=shard.num_examples, centring=config.centring_coefficient,
        )  # fmt: skip
        if logprobs is not None:
            language = next_token_loss(logprobs, batch.loss_mask, num_tokens=shard.num_tokens)
            loss = loss + config.language_model_coefficient * language
            metrics = merged(metrics, {"language_model_loss": Sum(language.detach())})
        loss, metrics = self.balanced(loss, metrics, routing, step_routing)
        return loss, metrics, torch.stack([chosen[real], rejected[real]], dim=1).detach()

    def measured(self, model: nn.Module, batch: PreferenceBatch, shard: Shard) -> Mapping[str, Metric]:
        """With the sums that `validate` computes exact metrics from."""
        _, metrics, rewards = self._judged(model, batch, shard)
        exact = rewards.double()
        sums = {_CORRECT: (exact[:, 0] > exact[:, 1]).sum(), _SUM: exact.sum(), _SQUARES: exact.square().sum()}
        return merged(metrics, {name: Sum(value) for name, value in sums.items()})

    def validate(self, shard: Shard) -> dict[str, float]:
        """Also `accuracy`, and mean and standard deviation of the rewards of all completions.

        The deviation is 0 where it is smaller than what float32 can tell apart.
        """
        measured = super().validate(shard)
        correct, total, squares = (measured.pop(name) for name in (_CORRECT, _SUM, _SQUARES))
        completions = 2 * shard.num_examples
        mean, square = total / completions, squares / completions
        variance = square - mean**2
        return {
            **measured,
            "accuracy": correct / shard.num_examples,
            "reward_mean": mean,
            "reward_std": 0.0 if variance <= _LEAST_VARIANCE * square else math.sqrt(variance),
        }

    def score(self, shard: Shard) -> Tensor:
        """(P, 2) float32 on CPU: the rewards of the chosen and the rejected completion of each pair of this rank."""

        def rewards(model: nn.Module, batch: PackedBatch) -> Tensor:
            chosen, rejected, real = _rewards(model(batch)[0], batch)
            return torch.stack([chosen[real], rejected[real]], dim=1)

        return torch.cat([part.cpu() for part in self.engine.forward(shard.micro_batches, rewards)])


def _rewards(scores: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards of the chosen and of the rejected completions, (P,) each, and which of the pairs are real (P,) bool.

    A pair of which nothing is trained is a filler.
    """
    last = batch.last_token_indices
    return scores[last][0::2], scores[last][1::2], batch.loss_mask[last][0::2]


def judge(
    config: RewardModelConfig, held_out: Sequence[Example], workers: WorkerGroup[RewardModelWorker]
) -> dict[str, float]:
    """On held-out pairs: `held_out_accuracy`; mean and standard deviation of the rewards of all completions.

    Raises StageError if the rewards are not finite or all equal: such a model can judge nothing.
    """
    shards = divide(pack_pairs(held_out), workers.size, config.engine.tokens_per_micro_batch)
    rewards = torch.cat(workers.scatter(RewardModelWorker.score, shards)).double()
    accuracy = (rewards[:, 0] > rewards[:, 1]).double().mean().item()
    return _judgement(len(held_out), accuracy, rewards.mean().item(), rewards.std(correction=0).item())


def judged_by_validation(num_pairs: int, measured: Mapping[str, float]) -> dict[str, float]:
    """As `judge`, from what `RewardModelWorker.validate` has measured of `num_pairs` pairs."""
    return _judgement(num_pairs, measured["accuracy"], measured["reward_mean"], measured["reward_std"])


def _judgement(num_pairs: int, accuracy: float, mean: float, std: float) -> dict[str, float]:
    if not math.isfinite(mean) or not math.isfinite(std) or std == 0:
        raise StageError(
            "the reward model's rewards of held-out completions are not usable: their mean is "
            f"{mean:g} and their standard deviation {std:g}"
        )
    return {"held_out_pairs": num_pairs, "held_out_accuracy": accuracy, "reward_mean": mean, "reward_std": std}


def finish_folder(folder: Path, tokenizer: PreTrainedTokenizerFast, *, reward_mean: float, reward_std: float) -> None:
    """Write what `AutoModelForSequenceClassification` and the RL stage need beside the weights into the folder.

    transformers reads the reward at the last token that is not padding, so the padding token must not be one that can
    end a completion. The tokenizer's own padding token is often EOS; then another special token is used.
    """
    pad = _padding_token(tokenizer)
    update_json(
        folder / "config.json",
        reward_mean=reward_mean,
        reward_std=reward_std,
        pad_token_id=tokenizer.convert_tokens_to_ids(pad) if pad else None,
    )
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            update_json(folder / name, pad_token=pad)


def _padding_token(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """None: score one sequence at a time; transformers refuses a batch then."""
    ending = stop_token_ids(tokenizer)
    candidates = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token)
    return next((t for t in candidates if t and tokenizer.convert_tokens_to_ids(t) not in ending), None)
