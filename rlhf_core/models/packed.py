"""Packed batches through transformers models: no padding in, no padding out, one value per token."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.models.adapters import base_model
from rlhf_core.models.folders.folder import longrope_limit
from rlhf_core.models.folders.vision_models import reads_images
from rlhf_core.models.layout_check import checked_layouts
from rlhf_core.models.layouts import ROWS, OfTokens, run_backbone
from rlhf_core.models.logprobs import CHUNK_ELEMENTS, chunked_logprobs
from rlhf_core.models.output_head import OutputHead
from rlhf_core.models.routing import experts_per_token, routing_sums
from rlhf_core.models.sequence_parallel import share, summed
from rlhf_core.models.shift import at_places, before, predicted_places
from rlhf_core.types import PackedBatch


class PackedModel(nn.Module):
    """A transformers model that computes a value for each token of a packed batch, without interaction of sequences."""

    layouts = ROWS  # until they are checked: slower than packed, and right for more models

    def __init__(self, model: nn.Module) -> None:
        """model: a PreTrainedModel, or a PeftModel of one."""
        super().__init__()
        self.model = model
        self._limit = longrope_limit(self._transformer.config.to_dict())

    def check_layouts(self, device: torch.device, *, compiled: bool = False, selective: bool = False) -> None:
        """Measure the layouts that this model computes correctly, and use these from now on.

        compiled: and compile its layers. selective: its layers are checkpointed selectively, which is checked too.

        Called in eval mode, and where a forward of the model works: under ZeRO-3 on all ranks, inside DeepSpeed's
        forward. Raises StageError if none is correct.
        """
        self.layouts = checked_layouts(self._transformer, self._outputs, device, compiled=compiled, selective=selective)

    @property
    def reads_images(self) -> bool:
        return reads_images(self._transformer.config.to_dict())

    @property
    def shares_prompts(self) -> bool:
        """True if shared prefixes of a batch's sequences are computed once."""
        return self.layouts.packed == "tree"

    def own_rows(self, values: Tensor) -> Tensor:
        """Return this rank's `share` of rows (M, ...), one for each token whose log-prob is computed, in order; all of
        them, unless ranks share tokens.
        """
        return values[share(len(values))] if self.layouts.cut else values

    @abstractmethod
    def _outputs(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return our and the model's own log-probs, as layout_check.Outputs."""

    def _of_batch(self, values: Tensor, places: Tensor, batch: PackedBatch) -> Tensor:
        """Return (N,): the `own_rows` of each rank, (M,), at `places` (M,), and 0 elsewhere; equal on all ranks that
        share tokens.
        """
        placed = at_places(values, places, batch)
        return summed(placed) if self.layouts.cut else placed

    @property
    def _transformer(self) -> Any:
        return base_model(self.model)

    def _hidden(self, batch: PackedBatch) -> OfTokens:
        """Return the last hidden state of each token."""
        return run_backbone(self._transformer, batch, self.layouts, limit=self._limit)[0]

    def _routed(self, batch: PackedBatch, counted: Tensor) -> tuple[OfTokens, Tensor]:
        """Return the hidden states of a mixture of experts, and `routing_sums` (2, E) of the tokens in `counted`."""
        hidden, router_logits = run_backbone(self._transformer, batch, self.layouts, routers=True, limit=self._limit)
        return hidden, routing_sums(router_logits, counted, experts_per_token(self._transformer))


class CausalModel(PackedModel):
    """A causal language model; subclasses define the outputs of forward from its next-token distributions."""

    def __init__(self, model: nn.Module, *, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        """model: a PreTrainedModel with a language-model head, or a PeftModel of one. chunk_elements: of the logits."""
        super().__init__(model)
        self._chunk_elements = chunk_elements

    @property
    def head(self) -> OutputHead:
        return OutputHead(self._transformer)

    @property
    def _vocabulary(self) -> int:
        size: int = self._transformer.config.get_text_config().vocab_size
        return size

    def _predicted(
        self, batch: PackedBatch, only: Tensor | None, *, with_routing: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the places (M,) int64 of the tokens to compute (see PolicyModel), of these the `own_rows`; the hidden
        states (M, d) that predict them, and the routing.
        """
        places = predicted_places(batch, only)
        routing = None
        if with_routing:
            hidden, routing = self._routed(batch, in_trained_example(batch))
        else:
            hidden = self._hidden(batch)
        return self.own_rows(places), hidden.dealt(before(places)), routing

    def _outputs(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        computed, expected = self.head(hidden), self._transformer(input_ids=ids, use_cache=False).logits[0]
        return computed.float().log_softmax(-1), expected.float().log_softmax(-1)


class PolicyModel(CausalModel):
    """A causal language model whose forward returns log-probs of the batch's own tokens.

    In float32 the result equals the sequences run one by one to 1e-5; in bfloat16 the backbone rounds to 8 bits, so
    that log-probs differ by up to a few 1e-2, while softmax and everything after it stay in float32.
    """

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        only: Tensor | None = None,
        with_routing: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return logprobs (N,) float32, entropy (N,) float32 or None, and `routing_sums` (2, E) of the experts or None.

        temperature: where the batch has none of its own. Index t is log p(token t | tokens < t) and the entropy of that
        distribution, which is of the batch's kept tokens if it has some; 0 at the first token of each sequence.
        only: (N,) bool, the tokens to compute (0 elsewhere): the head runs only on these, and with kept tokens each has
        some. The routing counts all tokens of sequences with trained ones, so that a `filler` adds nothing to it.
        """
        places, hidden, routing = self._predicted(batch, only, with_routing=with_routing)
        own = None if batch.temperatures is None else batch.temperatures[places]
        logprobs, entropy = chunked_logprobs(
            self.head, hidden, batch.input_ids[places], vocabulary=self._vocabulary,
            temperature=temperature if own is None else own.where(own > 0, temperature),
            kept=None if batch.kept_tokens is None else batch.kept_tokens[places],
            with_entropy=with_entropy, chunk_elements=self._chunk_elements,
        )  # fmt: skip
        return (
            self._of_batch(logprobs, places, batch),
            None if entropy is None else self._of_batch(entropy, places, batch),
            routing,
        )


class Classifier(PackedModel):
    """A sequence classifier with one label, read at every token."""

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return the scores (n,) float32 of hidden states (n, d)."""
        scores: Tensor = self._transformer.score(hidden)
        return scores.squeeze(-1).float()

    def _outputs(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._scores(hidden), self._transformer(input_ids=ids, use_cache=False).logits[0].float()


class ScalarModel(Classifier):
    """A reward model for inference, or a critic."""

    def __init__(self, model: nn.Module, *, offset: float = 0.0) -> None:
        """model: a PreTrainedModel with a `score` head of one output, or a PeftModel of one. offset: added to it."""
        super().__init__(model)
        self.offset = offset

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return the score of the hidden state at each token, (N,) float32, which depends on this token and those
        before.
        """
        return self._hidden(batch).of_each(self._scores) + self.offset


def in_trained_example(batch: PackedBatch, *, sequences: int = 1) -> Tensor:
    """Return whether any token of the same example is trained, (N,) bool. sequences: per example, next to each
    other.
    """
    examples = batch.sequence_ids // sequences
    count = batch.num_sequences // sequences
    trained = torch.zeros(count, device=examples.device).index_add_(0, examples, batch.loss_mask.float())
    return trained[examples] > 0
