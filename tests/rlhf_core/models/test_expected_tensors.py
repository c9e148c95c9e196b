"""What is expected of the weights of a common architecture is what transformers' class has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlhf_core.models.class_config import settings_of
from rlhf_core.models.expected_tensors import KNOWN_TYPES, tensor_problem
from rlhf_core.models.headers import StoredTensor

SMALL = {"hidden_size": 32, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
         "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {}, {"tie_word_embeddings": True}, {"head_dim": 16}, {"attention_bias": True, "mlp_bias": True},
]  # fmt: skip


def tensors(config: Any, *, scalar: bool = False) -> dict[str, StoredTensor]:
    """Those that a model of the config saves."""
    auto: Any = transformers.AutoModelForSequenceClassification if scalar else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    left_out = model.all_tied_weights_keys
    return {
        name: StoredTensor("model.safetensors", "F32", tuple(value.shape))
        for name, value in model.state_dict().items()
        if name not in left_out
    }


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("kind", KNOWN_TYPES)
def test_the_tensors_of_a_class_are_those_expected(kind: str, changes: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[kind](**{**SMALL, **changes})
    settings, stored = settings_of(config), tensors(config)
    assert tensor_problem(settings, stored, reward_model=False) is None
    without_body = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    assert tensor_problem(settings, without_body, reward_model=False) is None
    config.num_labels = 1
    assert tensor_problem(settings_of(config), tensors(config, scalar=True), reward_model=True) is None


def test_every_difference_is_said() -> None:
    config = CONFIG_MAPPING["llama"](**SMALL)
    settings, stored = settings_of(config), tensors(config)
    stored["model.layers.0.mlp.down_proj.weight"] = StoredTensor("model.safetensors", "F32", (12, 32))
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = StoredTensor("model.safetensors", "F32", (4,))
    stored["foo.bar"] = StoredTensor("model.safetensors", "F32", (3,))
    del stored["lm_head.weight"], stored["model.layers.1.self_attn.k_proj.weight"]
    assert tensor_problem(settings, stored, reward_model=False) == (
        "missing are lm_head.weight, model.layers.1.self_attn.k_proj.weight; foo.bar belong to another model; of "
        "another shape are model.layers.0.mlp.down_proj.weight (12×32, expected 32×12)"
    )
    assert tensor_problem({**settings, "model_type": "phi3"}, stored, reward_model=False) is None
