"""Updates without dropout compute the same as forwards in eval mode, also with checkpointed layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from rlhf_core.config.engines.training import GradientCheckpointing
from rlhf_core.models.activation_checkpointing import checkpoint_layers
from rlhf_core.models.dropout import set_train_mode

pytestmark = pytest.mark.parts

SHAPE = {
    "vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "use_cache": False,
}  # fmt: skip
# Dropout of modules, of functions inside attention and layers, layers that are dropped whole, and routers' noise.
RANDOM: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "attention_dropout": 0.5},
    "gpt2": {"vocab_size": 20, "n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False},
    "falcon": {**SHAPE, "hidden_dropout": 0.5, "attention_dropout": 0.5, "ffn_hidden_size": 48},
    "opt": {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3, "layerdrop": 0.5},
    "mixtral": {**SHAPE, "num_local_experts": 4, "router_jitter_noise": 0.5},
}


def model_of(kind: str, *, checkpointing: GradientCheckpointing) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **RANDOM[kind]))
    checkpoint_layers(model, checkpointing)
    return model


def logits_and_gradients(model: Any) -> tuple[Tensor, list[Tensor]]:
    logits = model(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]])).logits
    model.zero_grad()
    logits.square().sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", list(RANDOM))
def test_without_dropout_an_update_computes_what_a_forward_computes(kind: str) -> None:
    expected = logits_and_gradients(model_of(kind, checkpointing=False).eval())
    kinds: tuple[GradientCheckpointing, ...] = (False, True, "selective")
    for checkpointing in kinds:
        model = model_of(kind, checkpointing=checkpointing)
        kept = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        for _ in range(2):  # the second update like the first
            set_train_mode(model, dropout=False)
            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                logits, gradients = logits_and_gradients(model)
            assert logits.equal(expected[0])
            assert all(a.equal(b) for a, b in zip(gradients, expected[1], strict=True))
        if not checkpointing:
            unchecked = kept
        else:
            assert kept < 0.8 * unchecked, "its layers are not checkpointed"


@pytest.mark.parametrize("kind", list(RANDOM))
def test_with_dropout_an_update_draws(kind: str) -> None:
    model = model_of(kind, checkpointing=False)
    expected, _ = logits_and_gradients(model.eval())
    set_train_mode(model, dropout=True)
    draws = [logits_and_gradients(model)[0] for _ in range(4)]
    assert not all(draw.equal(expected) for draw in draws)


def test_dropout_comes_back_where_layers_are_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RANDOM["opt"], "layerdrop", 0.0)  # what is left is in the layers that are checkpointed
    model = model_of("opt", checkpointing=True)
    expected, _ = logits_and_gradients(model.eval())
    for dropout in (False, True, False):
        set_train_mode(model, dropout=dropout)
        assert logits_and_gradients(model)[0].equal(expected) is not dropout
