"""Loading and saving folders of models, scalar models and adapters."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import StageError
from rlhf_core.models.loading import load_causal_model, load_scalar_model, torch_dtype
from tests.rlhf_core.models.saved import save_state

pytestmark = pytest.mark.parts

IDS = torch.tensor([[3, 1, 4, 1, 5]])


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_the_dtypes_of_the_configuration() -> None:
    assert (torch_dtype("float32"), torch_dtype("bfloat16")) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("folder", ["model_folder", "untied_folder"])
def test_a_saved_model_loads_bit_for_bit(folder: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source: Path = request.getfixturevalue(folder)
    model = load_causal_model(source, dtype=torch.float32, attention="sdpa")
    state = {name: tensor + 1 for name, tensor in parameters(model).items()}
    save_state(model, state, tmp_path / "out", source)
    again = parameters(LlamaForCausalLM.from_pretrained(tmp_path / "out"))
    assert set(again) == set(state)
    assert all(torch.equal(again[name], state[name]) for name in state)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert (
        "use_cache" not in json.loads((tmp_path / "out" / "config.json").read_text())
        or json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"]
    )


def test_an_adapters_config_is_the_same_wherever_it_was_made(model_folder: Path, tmp_path: Path) -> None:
    texts = []
    for place in ("here", "there"):
        shutil.copytree(model_folder, tmp_path / place)
        model = load_causal_model(tmp_path / place, dtype=torch.float32, attention="sdpa", lora=LoraConfig(rank=2))
        save_state(model, {}, tmp_path / f"{place}-adapter", None)
        texts.append((tmp_path / f"{place}-adapter" / "adapter_config.json").read_text())
    assert texts[0] == texts[1]
    modules = json.loads(texts[0])["target_modules"]
    assert len(modules) > 1
    assert modules == sorted(modules)  # peft has them in a set


def test_the_tokenizer_of_a_read_only_artifact_is_copied_writable(model_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    os.chmod(source / "tokenizer.json", 0o444)
    model = load_causal_model(model_folder, dtype=torch.float32, attention="sdpa")
    for _ in range(2):
        save_state(model, parameters(model), tmp_path / "out", source)
    assert os.stat(tmp_path / "out" / "tokenizer.json").st_mode & 0o200


def test_a_scalar_model_from_a_causal_one_has_its_backbone_and_a_head_by_seed(model_folder: Path) -> None:
    causal = parameters(load_causal_model(model_folder, dtype=torch.float32, attention="sdpa"))
    first, same, other = (
        parameters(load_scalar_model(model_folder, dtype=torch.float32, attention="sdpa", seed=seed))
        for seed in (1, 1, 2)
    )
    assert set(first) == set(causal) | {"score.weight"}
    assert all(torch.equal(first[name], causal[name]) for name in causal)
    assert first["score.weight"].shape == (1, 16)
    assert torch.equal(first["score.weight"], same["score.weight"])
    assert not torch.equal(first["score.weight"], other["score.weight"])


def test_a_saved_scalar_model_keeps_its_head(model_folder: Path, tmp_path: Path) -> None:
    model = load_scalar_model(model_folder, dtype=torch.float32, attention="sdpa")
    model.config.reward_mean, model.config.reward_std = 0.5, 2.0
    save_state(model, parameters(model), tmp_path, model_folder)
    again = load_scalar_model(tmp_path, dtype=torch.float32, attention="sdpa", seed=99)
    assert all(torch.equal(tensor, parameters(again)[name]) for name, tensor in parameters(model).items())
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["architectures"] == ["LlamaForSequenceClassification"]
    assert (stored["reward_mean"], stored["reward_std"]) == (0.5, 2.0)


def test_a_classifier_of_two_labels_is_refused(model_folder: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(StageError, match="has several labels; a scalar model has one"):
        load_scalar_model(tmp_path, dtype=torch.float32, attention="sdpa")


def test_a_folder_without_safetensors_is_refused(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(StageError, match=r"transformers cannot load a model with .* these weights"):
        load_causal_model(tmp_path, dtype=torch.float32, attention="sdpa")


def test_an_adapter_starts_as_identity_and_trains_alone(model_folder: Path) -> None:
    base = load_causal_model(model_folder, dtype=torch.float32, attention="sdpa")
    adapted = load_causal_model(
        model_folder, dtype=torch.bfloat16, attention="sdpa", lora=LoraConfig(rank=2, alpha=4.0)
    ).float()
    assert torch.allclose(adapted(input_ids=IDS).logits, base(input_ids=IDS).logits, atol=0.1)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 7
    assert all("lora_" in name for name in trained)


def test_adapter_weights_have_the_dtype_of_the_model(model_folder: Path) -> None:
    adapted = load_causal_model(model_folder, dtype=torch.bfloat16, attention="sdpa", lora=LoraConfig(rank=2))
    assert {p.dtype for p in adapted.parameters()} == {torch.bfloat16}


def test_target_modules_may_be_named_and_a_wrong_name_is_answered_with_the_right_ones(model_folder: Path) -> None:
    load = {"dtype": torch.float32, "attention": "sdpa"}
    adapted = load_causal_model(model_folder, lora=LoraConfig(rank=2, target_modules=("q_proj",)), **load)
    assert sum(p.requires_grad for p in adapted.parameters()) == 2 * 2
    with pytest.raises(StageError, match=r"lora.target_modules names query; the linear layers .* are .*q_proj"):
        load_causal_model(model_folder, lora=LoraConfig(rank=2, target_modules=("query",)), **load)
