"""Weights that do not match the config: rejected at every load, where transformers would draw random ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
)

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import StageError
from rlhf_core.models.folders.folder import Head
from rlhf_core.models.loading import load_causal_model, load_scalar_adapter, load_scalar_model
from rlhf_core.models.merging import merge_adapter
from rlhf_core.models.weights import require_fit
from tests.rlhf_core.models.saved import save_state

pytestmark = pytest.mark.parts

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], None]

LOAD: dict[str, Any] = {"dtype": torch.float32, "attention": "sdpa"}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.input_layernorm.weight"


def changed(source: Path, folder: Path, change: Change = lambda tensors: None, **config: Any) -> Path:
    """A copy of the model folder `source` with other tensors, and other settings."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def without(prefix: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def refusals(folder: Path) -> list[str]:
    """What each load of the folder says, where it says something."""
    said = []
    for load in (lambda: require_fit(folder, "causal"), lambda: load_causal_model(folder, **LOAD),
                 lambda: load_scalar_model(folder, **LOAD)):  # fmt: skip
        try:
            load()
        except StageError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("change", "config", "expected"),
    [
        (
            without("model.layers.1."), {},
            "LlamaForCausalLM): missing are model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight"
            ", model.layers.1.mlp.gate_proj.weight and 6 more: give config.json and weights of one model",
        ),
        (lambda t: t.update(extra=torch.ones(1)), {}, "extra belong to another model"),
        (lambda t: t.update({NORM: torch.ones(17)}), {}, f"of another shape are {NORM} (17, expected 16)"),
        (without(HEAD), {}, "missing are lm_head.weight: "),
        (without(""), {}, "no tensors"),
        (without("-"), {"num_hidden_layers": 3}, "missing are model.layers.2."),
        (without("-"), {"num_hidden_layers": 1}, "model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj"),
        (without("-"), {"vocab_size": 32}, f"{EMBEDDING} (31×16, expected 32×16)"),
        (without("-"), {"tie_word_embeddings": True}, "config.json makes lm_head.weight one with model.embed_tokens.w"),
        (without("-"), {"hidden_size": 20, "head_dim": 4}, "of another shape are "),
        (without("-"), {"model_type": "t5"}, "a model of model_type 't5' is not a causal language model: take one"),
        (without("-"), {"hidden_act": "sillu"}, "transformers cannot load a model with this config.json and these"),
        (without("-"), {"rope_parameters": {"rope_type": "yarm", "rope_theta": 1e4}}, "correct config.json, or fetch"),
        (without("-"), {"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "correct config.json, or f"),
        (without("-"), {"rope_parameters": 5}, "config.json is not what transformers expects of its model_type: corr"),
        (without("-"), {"text_config": {}}, "the class has no parts, so no `text_config`: remove it"),
        (without("-"), {"attention_bias": True}, "missing are model.layers.0.self_attn.k_proj.bias, "),
        (without("-"), {"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "transformers cannot load a model w"),
        (
            without("-"), Qwen2Config(hidden_size=16, vocab_size=31, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2).to_dict(),
            "(Qwen2ForCausalLM): missing are model.layers.0.self_attn.k_proj.bias, ",
        ),
    ],
)  # fmt: skip
def test_weights_that_are_not_those_of_the_config(
    untied_folder: Path, tmp_path: Path, change: Change, config: dict[str, Any], expected: str
) -> None:
    folder = changed(untied_folder, tmp_path / "model", change, **config)
    said = refusals(folder)
    assert len(said) == 3
    assert expected in said[0]
    assert all(str(folder) in sentence for sentence in said)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 3}},
            "rope_parameters.partial_rotary_factor is 3; it must be above 0, and at most 1: correct it",
        ),
        ({"head_dim": 0}, "head_dim is 0, and its rotary positions need one above 0: correct it"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok is 3; it must be from 1 to the number of experts, 2: correct it",
        ),
        ({"model_type": "phi3"}, "pad_token_id is 32000 (by default), but the vocabulary ends at 30: set it"),
        (
            {"model_type": "gemma2", "sliding_window": None},
            "sliding_window is null, and layers slide (layer_types): give a whole number above 0",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_with_which_a_model_is_built_but_does_not_run(
    untied_folder: Path, tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    folder = changed(untied_folder, tmp_path / "model", **settings)
    config = json.loads((folder / "config.json").read_text())
    del config["pad_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(StageError) as raised:
        require_fit(folder, "causal")
    assert str(raised.value) == f"{folder}: config.json: {expected}"


@pytest.mark.parametrize("head", ["causal", "scalar"])
def test_code_beside_the_weights_is_never_run(model_folder: Path, tmp_path: Path, head: Head) -> None:
    """Also not where transformers has a config for the model_type, and would ask on the terminal whether to run it."""
    code = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification"), "own.Own")
    folder = changed(model_folder, tmp_path / "model", model_type="vit", auto_map=code)
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'run')!r}).touch()\n")
    with pytest.raises(StageError, match=r"names Python code of the model's own .* which is never run"):
        require_fit(folder, head)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: None,
        lambda t: t.update({HEAD: t[EMBEDDING].clone()}),
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}),
        lambda t: t.update({name.removeprefix("model."): t.pop(name) for name in list(t)}),
    ],
    ids=["head left out", "head stored too", "an old buffer", "without prefix"],
)
def test_what_transformers_leaves_out_on_purpose(model_folder: Path, tmp_path: Path, change: Change) -> None:
    folder = changed(model_folder, tmp_path / "model", change)
    assert refusals(folder) == []
    expected = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    assert all(torch.equal(expected[n], t) for n, t in load_causal_model(folder, **LOAD).state_dict().items())


def test_weights_of_other_names_on_disk_than_in_memory(tmp_path: Path) -> None:
    """Experts are stored one by one; old GPT-2 folders have buffers and no prefix."""
    mixtral = MixtralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3,
    )  # fmt: skip
    MixtralForCausalLM(mixtral).save_pretrained(tmp_path / "experts")
    gpt2 = GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")

    def as_of_old(tensors: Tensors) -> None:
        tensors |= {name.removeprefix("transformer."): tensors.pop(name) for name in list(tensors)}
        tensors["h.0.attn.bias"] = torch.ones(1)

    old = changed(tmp_path / "gpt2", tmp_path / "old", as_of_old)
    assert [refusals(folder) for folder in (tmp_path / "experts", tmp_path / "gpt2", old)] == [[], [], []]
    expert = "model.layers.1.block_sparse_moe.experts.1.w1.weight"
    [first, *_] = refusals(changed(tmp_path / "experts", tmp_path / "lacking", without(expert)))
    assert "transformers cannot load a model with this config.json and these weights" in first


def test_a_trained_head_must_be_there(model_folder: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1).save_pretrained(tmp_path / "scalar")
    load_scalar_model(tmp_path / "scalar", **LOAD)
    require_fit(tmp_path / "scalar", "scalar")
    folder = changed(tmp_path / "scalar", tmp_path / "lacking", without("score"))
    with pytest.raises(StageError, match=r"LlamaForSequenceClassification\): missing are score\.weight"):
        load_scalar_model(folder, **LOAD)
    with pytest.raises(StageError, match=r"LlamaForCausalLM\): score\.weight belong to another model"):
        load_causal_model(tmp_path / "scalar", **LOAD)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            without("base_model.model.model.layers.1.mlp.up_proj.lora_B"),
            r"absent in adapter_model\.safetensors and \(24",
        ),
        (lambda t: t.update({"base_model.model.extra.lora_A.weight": torch.ones(1)}), "and absent in the model"),
        (lambda t: t.update({n: torch.zeros(3, 3) for n in t}), "size mismatch"),
        (without(""), r"absent in adapter_model|model\.score\.weight"),
    ],
)
def test_an_adapter_that_is_not_whole(model_folder: Path, tmp_path: Path, change: Change, expected: str) -> None:
    for load, head in ((load_causal_model, "causal"), (load_scalar_model, "scalar")):
        adapted = load(model_folder, lora=LoraConfig(rank=2), **LOAD)
        tensors = dict(get_peft_model_state_dict(adapted))
        change(tensors)
        save_state(adapted, tensors, tmp_path / head, None)
        with pytest.raises(StageError, match=f"(?s)this adapter does not fit .*{expected}"):
            merge_adapter(model_folder, tmp_path / head, tmp_path / "merged")
    with pytest.raises(StageError, match=f"(?s)this adapter does not fit .*{expected}"):
        load_scalar_adapter(model_folder, tmp_path / "scalar", **LOAD)
