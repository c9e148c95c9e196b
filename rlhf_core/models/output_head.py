"""Logits of hidden states as in the model's own forward, for any number of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast


class OutputHead:
    """The part of a causal language model after its backbone: projection, bias, scale, soft cap and whatever else its
    class has.

    The model's own forward is run with a backbone that returns the given hidden states. So no setting of a config has
    to be known by name; layout_check.py compares the result with `model(ids).logits` once a model is loaded.
    """

    def __init__(self, model: Any) -> None:
        """model: a PreTrainedModel with a language-model head."""
        self._model = model

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits (M, V) of hidden states (M, d)."""
        output = _Hidden(last_hidden_state=hidden.unsqueeze(0))  # type: ignore[arg-type]  # of any dtype and device
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        with ExitStack() as stack:
            for layers in _called(self._model):
                stack.enter_context(_returning(layers, output))
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits.squeeze(0)  # the gradient of [0] is zeros of the size of the logits, and a copy into them

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the model's parameters: the backbone's are sharded exactly if the head's are."""
        parameters: Iterator[nn.Parameter] = self._model.parameters()
        return parameters


def backbone(model: Any) -> nn.Module:
    """Return the layers of a PreTrainedModel without its head; embeddings are among them."""
    # Classes of the text part of a larger model may have the larger model's prefix.
    layers: nn.Module = getattr(model, model.base_model_prefix, None) or model.model
    return layers


def _called(model: Any) -> set[nn.Module]:
    """Return the modules that the model's forward may call for hidden states: usually its backbone, in some classes the
    decoder in it.
    """
    layers, decoder = backbone(model), model.get_decoder()
    return {layers, decoder} if decoder in set(layers.modules()) else {layers}


class _Hidden(BaseModelOutputWithPast):
    """A model output; fields added by classes of models are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _returning(layers: nn.Module, output: _Hidden) -> Iterator[None]:
    """Make calls of `layers` return `output` inside."""
    wrapped = layers.__dict__.get("forward")  # where a library has wrapped it
    layers.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del layers.forward
        if wrapped is not None:
            layers.forward = wrapped
