"""Checks of config.json and the headers of the weights, before any weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlhf_core.models.folders.check import folder_problems
from rlhf_core.models.folders.class_config import settings_of, settings_problems
from rlhf_core.models.loading import load_scalar_model
from tests.rlhf_core.recipes import model_folder

pytestmark = pytest.mark.parts


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_parameters.rope_theta is 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "rope_parameters.rope_theta is '1e4'"),
        ({"rope_theta": -1e4}, "rope_theta is -10000.0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": True}}},
            "rope_parameters.full_attention.factor is True",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": "64"}},
            "rope_parameters.original_max_position_embeddings is '64'",
        ),
    ],
)
def test_positions_without_angles(tmp_path: Path, settings: dict[str, Any], place: str) -> None:
    model_folder(tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert list(folder_problems(tmp_path / "model")) == [
        f"config.json: {place}; it must be a number above 0: fetch config.json again"
    ]


def test_weights_of_any_shape_are_floats(tmp_path: Path) -> None:
    model_folder(tmp_path)
    path = tmp_path / "model" / "model.safetensors"
    whole = numpy.ones(64, dtype=numpy.int64)
    save_file({**load_file(path), "model.norm.weight": whole}, path, metadata={"format": "pt"})
    assert list(folder_problems(tmp_path / "model")) == [
        "model.norm.weight in model.safetensors has the dtype I64, in which no model is trained: give the full weights"
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"return_dict": None},
            "config.json: `return_dict` is null, and training reads the outputs by name: remove it",
        ),
        (
            {"transformers_weights": "other.safetensors"},
            "config.json: `transformers_weights` names other weights than those of this folder: remove it",
        ),
        (
            {"output_attentions": True},
            "config.json: `output_attentions` asks for what eager attention alone gives: remove it",
        ),
        (
            {"text_config": {"output_attentions": True}},
            "config.json: `text_config.output_attentions` asks for what eager attention alone gives: remove it",
        ),
        (
            {"_attn_implementation": "flash_attention_2"},
            'config.json: `_attn_implementation` is "flash_attention_2"; the recipe says how to compute: remove it',
        ),
        (
            {"sub_configs": {}},
            "config.json: `sub_configs` belongs to transformers' class, not to a model: remove it",
        ),
        (
            {"use_bidirectional_attention": True},
            "config.json: `use_bidirectional_attention` is true, so tokens see those after them, and there are no "
            "log-probs to train: give a causal language model",
        ),
        (
            {"text_config": {"dtype": "float"}},
            'config.json: `text_config.dtype` is "float", and weights are float64, float32, float16 or bfloat16: '
            "correct it",
        ),
        ({"attention_dropout": 1.5}, "config.json: attention_dropout is 1.5; it must be from 0 to 1: correct it"),
        ({"query_pre_attn_scalar": 0}, "config.json: query_pre_attn_scalar is 0; it must be above 0: correct it"),
        ({"logits_scaling": 0}, "config.json: logits_scaling is 0, and the model divides by it: correct it"),
        (
            {"num_hidden_layers": 10**9},
            "config.json says num_hidden_layers 1000000000, but the weights have 20 tensors: give config.json and "
            "weights of one model",
        ),
        (
            {"num_labels": 10**8},
            "config.json: num_labels is 100000000, and no model has more than 65536: remove it",
        ),
    ],
)
def test_settings_by_which_transformers_loads_otherwise(
    tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    model_folder(tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert list(folder_problems(tmp_path / "model")) == [expected]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "added_tokens.json"]
)
def test_a_key_twice_has_no_meaning(tmp_path: Path, name: str) -> None:
    model_folder(tmp_path)
    path = tmp_path / "model" / name
    content = json.dumps(json.loads(path.read_text()) if path.exists() else {"a": 1})
    path.write_text(f'{{"own": {{"b": 1, "b": 2}}, {content.removeprefix("{")}')
    assert list(folder_problems(tmp_path / "model")) == [
        f"{name}: the key `b` occurs twice in one object: remove one of them"
    ]


def reward_model(root: Path, head: str = "score.weight", rows: int = 1, **settings: object) -> Path:
    """A classifier with one label, but for the arguments."""
    model_folder(root)
    folder = root / "model"
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors[head] = numpy.zeros((rows, 64), dtype=numpy.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("labels", [{}, {"num_labels": None, "id2label": {"0": "reward"}}], ids=["number", "names"])
def test_a_reward_model_has_one_label_and_its_head(tmp_path: Path, labels: dict[str, Any]) -> None:
    folder = reward_model(tmp_path, **labels)
    assert list(folder_problems(folder, reward_model=True)) == []
    scalar = load_scalar_model(folder, dtype=torch.float32, attention="sdpa")
    assert scalar.score.weight.shape == (1, 64)


NO_CLASSIFIER = (
    ", and a reward model is a sequence classifier (…ForSequenceClassification), which has a head `score`: give one "
    "that was saved as this class, or train one by a stage `reward_model`"
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architectures": None}, f"config.json: `architectures` is missing{NO_CLASSIFIER}"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            f"config.json: `architectures` names LlamaForCausalLM{NO_CLASSIFIER}",
        ),
        (
            {"num_labels": None},
            "config.json: the classifier has 2 labels (`id2label`; 2 if it is left out), and a reward model has one: "
            "take another, or correct it",
        ),
        (
            {"id2label": {"0": "a", "1": "b", "2": "c"}},
            "config.json: the classifier has 3 labels (`id2label`; 2 if it is left out), and a reward model has one: "
            "take another, or correct it",
        ),
        (
            {"head": "v_head.summary.weight"},
            "the weights have no score.weight, the head that a reward is read from (there is v_head.summary.weight): "
            "give a reward model",
        ),
        ({"rows": 2}, "score.weight in model.safetensors has 2 rows, and a reward model has one label: take another"),
    ],
    ids=["no class", "another class", "labels by default", "three labels", "another head", "two rows"],
)
def test_what_is_no_reward_model(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    assert list(folder_problems(reward_model(tmp_path, **change), reward_model=True)) == [expected]


COMMON = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3", "gpt_neox", "gpt2", "opt",
    "falcon", "olmo2", "deepseek_v3", "gpt_oss",
)  # fmt: skip


def test_what_transformers_gives_by_default_is_no_problem() -> None:
    assert {kind: list(settings_problems(settings_of(CONFIG_MAPPING[kind]()))) for kind in COMMON} == {
        kind: [] for kind in COMMON
    }
