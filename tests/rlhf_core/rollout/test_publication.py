"""What a publish carries, and the folders that it lies in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.models.safetensors_file import read_shapes
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.publication import Publication, publication_of
from rlhf_core.rollout.transport.folder import SharedFolder, received

pytestmark = pytest.mark.parts


def folder_of(weights: Publication) -> Path:
    assert isinstance(weights.transport, SharedFolder)
    return weights.transport.folder


def test_a_folder_of_full_weights_holds_them_and_goes() -> None:
    state = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    with publication_of(state, 1) as weights:
        assert read_shapes(folder_of(weights)) == {"a.weight": (2, 3), "b": (4,)}
        loaded = load_file(folder_of(weights) / "model.safetensors")
        assert torch.equal(loaded["a.weight"], state["a.weight"])
        assert loaded["b"].dtype == torch.bfloat16
        assert weights.manifest.digests == {name: tensor_digest(tensor) for name, tensor in state.items()}
    assert not folder_of(weights).exists()


def test_a_tied_tensor_is_published_once_and_a_transposed_one_as_it_reads() -> None:
    weight = torch.arange(4.0).reshape(2, 2)
    state = {"model.embed_tokens.weight": weight, "lm_head.weight": weight, "turned": torch.arange(6.0).reshape(2, 3).T}
    with publication_of(state, 1, dtype=torch.bfloat16) as weights:
        loaded = load_file(folder_of(weights) / "model.safetensors")
        assert set(weights.manifest.digests) == set(loaded) == {"model.embed_tokens.weight", "turned"}
        assert weights.manifest.digests["turned"] == tensor_digest(loaded["turned"])
    assert loaded["turned"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert loaded["turned"].dtype == torch.bfloat16


def test_another_node_gets_the_same_files() -> None:
    state = {"base_model.model.q_proj.lora_A.weight": torch.randn(2, 4)}
    with publication_of(state, 1, lora=LoraConfig(rank=2)) as weights:
        files = weights.files()
        contents = {file.name: file.read_bytes() for file in folder_of(weights).iterdir()}
    with received(files) as folder:
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == contents
    assert not folder.exists()


def test_an_adapter_folder_is_what_peft_reads() -> None:
    prefix = "base_model.model.model.layers.0"
    state = {
        f"{prefix}.self_attn.q_proj.lora_A.weight": torch.ones(2, 4),
        f"{prefix}.self_attn.q_proj.lora_B.weight": torch.ones(4, 2),
        f"{prefix}.mlp.up_proj.lora_A.weight": torch.ones(2, 4),
        f"{prefix}.mlp.up_proj.lora_B.weight": torch.ones(4, 2),
    }
    with publication_of(state, 1, lora=LoraConfig(rank=2, alpha=8.0)) as weights:
        config = json.loads((folder_of(weights) / "adapter_config.json").read_text())
        assert set(load_file(folder_of(weights) / "adapter_model.safetensors")) == set(state)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 8.0, ["q_proj", "up_proj"])
    with (
        pytest.raises(WeightSyncError, match=r"`model.norm.weight` is not a LoRA factor"),
        publication_of({"model.norm.weight": torch.ones(4)}, 1, lora=LoraConfig(rank=2)),
    ):
        pass
