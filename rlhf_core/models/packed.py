"""Packed batches through transformers models: no padding in, no padding out, one value a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf_core.errors import StageError
from rlhf_core.models.adapters import base_model
from rlhf_core.models.logprobs import CHUNK_ELEMENTS, chunked_logprobs
from rlhf_core.models.routing import experts_per_token, routing_sums
from rlhf_core.types import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Settings of transformers that scale logits in ways the chunked head does not know.
_UNKNOWN_LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")


class PolicyModel(nn.Module):
    """A causal language model whose forward returns log-probs of the batch's own tokens.

    In float32 the result equals the sequences run one by one to 1e-5; in bfloat16 the backbone rounds to 8 bits, so
    that log-probs differ by up to a few 1e-2, while softmax and everything after it stay in float32.
    """

    def __init__(self, model: nn.Module, *, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        """model: a PreTrainedModel with a language-model head, or a PeftModel of one. chunk_elements: of the logits."""
        super().__init__()
        self.model = model
        self._chunk_elements = chunk_elements
        config = base_model(model).config
        scaled = [name for name in _UNKNOWN_LOGIT_SCALES if getattr(config, name, None) not in (None, 1, 1.0)]
        if scaled:
            raise StageError(f"{type(base_model(model)).__name__}: models with `{scaled[0]}` are not supported")
        self._soft_cap: float | None = getattr(config, "final_logit_softcapping", None)

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        only: Tensor | None = None,
        with_routing: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """logprobs (N,) float32, entropy (N,) float32 or None, and `routing_sums` (2, E) of the experts or None.

        Index t is log p(token t | tokens < t) and the entropy of that distribution; 0 at the first token of each
        sequence. only: (N,) bool, the tokens to compute (0 elsewhere): the head runs on these alone. The routing counts
        all tokens of the sequences that train any, so that a `filler` adds nothing to it.
        """
        wanted = batch.position_ids != 0
        if only is not None:
            wanted = wanted & only
        places = wanted.nonzero().squeeze(-1)
        causal = base_model(self.model)
        hidden, router_logits = _run(causal, batch, routers=with_routing)
        logprobs, entropy = chunked_logprobs(
            causal.get_output_embeddings(), hidden[places - 1], batch.input_ids[places],
            vocabulary=causal.config.get_text_config().vocab_size, temperature=temperature, soft_cap=self._soft_cap,
            with_entropy=with_entropy, chunk_elements=self._chunk_elements,
        )  # fmt: skip
        return (
            _scatter(logprobs, places, batch),
            None if entropy is None else _scatter(entropy, places, batch),
            routing_sums(router_logits, in_trained_example(batch), experts_per_token(causal)) if with_routing else None,
        )


class ScalarModel(nn.Module):
    """A sequence classifier with one label, read at every token: reward model and critic."""

    def __init__(self, model: nn.Module, *, offset: float = 0.0) -> None:
        """model: a PreTrainedModel with a `score` head of one output, or a PeftModel of one. offset: added to it."""
        super().__init__()
        self.model = model
        self.offset = offset

    def forward(self, batch: PackedBatch) -> Tensor:
        """(N,) float32: the score of the hidden state at each token, which has seen this token and those before."""
        classifier = base_model(self.model)
        scores: Tensor = classifier.score(hidden_states(classifier, batch))
        return scores.squeeze(-1).float() + self.offset


def backbone(model: nn.Module) -> nn.Module:
    """The layers of a PreTrainedModel (or of a PeftModel's) without its head; embeddings are among them."""
    base = base_model(model)
    layers: nn.Module = getattr(base, base.base_model_prefix)
    return layers


def hidden_states(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """(N, d): the last hidden state of each token of `batch`, sequences apart from each other.

    Laid out as one row of N tokens with restarting positions, or, where the attention kernel would then compute N x N
    scores, as one right-padded row a sequence (causal attention never looks at what comes after).
    """
    return _run(model, batch)[0]


def routed_hidden_states(model: PreTrainedModel, batch: PackedBatch, counted: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden states (N, d) of a mixture-of-experts model, and `routing_sums` (2, E) of the tokens in `counted`."""
    hidden, router_logits = _run(model, batch, routers=True)
    return hidden, routing_sums(router_logits, counted, experts_per_token(model))


def _run(model: PreTrainedModel, batch: PackedBatch, *, routers: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The hidden states (N, d), and, if asked for, each router's logits (N, E)."""
    options = {"output_router_logits": True} if routers else {}
    layers = backbone(model)
    if _rows_are_cheaper(model, batch):
        ids, real = _rows(batch)
        output = layers(input_ids=ids, use_cache=False, **options)
    else:
        real = None
        output = layers(
            input_ids=batch.input_ids.unsqueeze(0), position_ids=batch.position_ids.unsqueeze(0), use_cache=False,
            **options,
        )  # fmt: skip

    def tokens(values: Tensor) -> Tensor:
        flat = values.flatten(0, -2)
        return flat if real is None else flat[real.flatten()]

    return tokens(output.last_hidden_state), [tokens(logits) for logits in output.router_logits] if routers else []


def _rows(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """(S, longest) token ids, one right-padded row a sequence, and which of them are real."""
    lengths = batch.sequence_lengths
    ids = batch.input_ids.new_zeros(batch.num_sequences, int(lengths.max()))
    real = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0) < lengths.unsqueeze(1)
    return ids.masked_scatter(real, batch.input_ids), real


def in_trained_example(batch: PackedBatch, *, sequences: int = 1) -> Tensor:
    """(N,) bool: whether any token of the same example is trained. sequences: side by side in each example."""
    examples = batch.sequence_ids // sequences
    count = batch.num_sequences // sequences
    trained = torch.zeros(count, device=examples.device).index_add_(0, examples, batch.loss_mask.float())
    return trained[examples] > 0


def _rows_are_cheaper(model: PreTrainedModel, batch: PackedBatch) -> bool:
    """Whether padding costs less than the attention between sequences, which only a mask would throw away."""
    if model.config._attn_implementation not in ("sdpa", "eager"):
        return False  # flash attention takes the boundaries and skips what lies between sequences
    longest, tokens = int(batch.sequence_lengths.max()), batch.num_tokens
    padded = batch.num_sequences * longest
    # A token costs about 24 d^2 multiply-adds a layer in matrix products and 4 d per token it attends to.
    products = 6 * model.config.get_text_config().hidden_size
    return padded <= 4 * tokens and padded * (products + longest) < tokens * (products + tokens)


def _scatter(values: Tensor, places: Tensor, batch: PackedBatch) -> Tensor:
    return values.new_zeros(batch.num_tokens).index_put((places,), values)
