"""Weights as the folder of their model has them, without all of them in memory."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import StageError
from rlhf_core.models import loading
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.safetensors_file import write_safetensors
from rlhf_core.models.stored import saved_weights, stored_groups, stored_layout, stored_state
from tests.rlhf_core.models.saved import save_state
from tests.rlhf_core.rollout.models import make_experts

pytestmark = pytest.mark.parts

LOAD = {"dtype": torch.float32, "attention": "sdpa"}


def tensors() -> dict[str, Tensor]:
    dtypes = (torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.int64, torch.float16, torch.int32)
    state = {f"{'cab'[i % 3]}.{i}": torch.arange(3 * (i + 1)).reshape(3, -1).to(d) for i, d in enumerate(dtypes)}
    return state | {
        "turned": torch.randn(5, 2).T,
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 4),
        'ä"\\': torch.ones(3),
    }


def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    """Artifacts are known by their bytes."""
    state = tensors()
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    write_safetensors({tmp_path / "ours": state}, reversed(state.items()))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    written: list[weakref.ref[Tensor]] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            assert [tensor() for tensor in written[:-1]] == [None] * len(written[:-1])
            tensor = torch.ones(2)
            written.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    write_safetensors({tmp_path / "file": dict.fromkeys("abc", torch.empty(2, device="meta"))}, weights())
    assert len(load_file(tmp_path / "file")) == len(written) == 3


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([("a", torch.ones(2))], "end without 1 tensors that were announced, as `b`"),
        ([("a", torch.ones(2)), ("a", torch.ones(2))], "a tensor `a` that was not announced, or twice"),
        ([("a", torch.ones(2)), ("c", torch.ones(2))], "a tensor `c` that was not announced, or twice"),
        ([("a", torch.ones(3))], r"`a` is torch.float32 \(3,\), but torch.float32 \(2,\) was announced"),
        ([("a", torch.ones(2).half())], r"`a` is torch.float16 \(2,\), but torch.float32"),
    ],
)
def test_other_tensors_than_were_announced_are_an_error(
    tmp_path: Path, weights: list[tuple[str, Tensor]], message: str
) -> None:
    with pytest.raises(StageError, match=message):
        write_safetensors({tmp_path / "file": {"a": torch.ones(2), "b": torch.ones(2)}}, weights)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_weights_are_converted_one_by_one_as_all_together(tmp_path: Path, family: str) -> None:
    make_experts(tmp_path, family)
    model = load_causal_model(tmp_path, **LOAD)
    own, folder = saved_weights(model), load_file(tmp_path / "model.safetensors")
    groups = stored_groups(model, own)
    assert {len(group) for group in groups} == {1}
    found = {name: t for group in groups for name, t in stored_state(model, {n: own[n] for n in group}).items()}
    assert found.keys() == folder.keys() == stored_layout(model).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in folder.items())
    assert all(tensor.device.type == "meta" for tensor in stored_layout(model).values())
    assert {n: (t.shape, t.dtype) for n, t in stored_layout(model).items()} == {
        n: (t.shape, t.dtype) for n, t in folder.items()
    }


def test_weights_that_a_folder_fuses_are_converted_together(tmp_path: Path) -> None:
    """transformers splits what the folder has fused: to write it, it needs all parts at once."""
    model = tiny(tmp_path)
    from transformers.core_model_loading import Chunk, WeightConverter

    fused = WeightConverter("qkv_proj.weight", ["q_proj.weight", "k_proj.weight", "v_proj.weight"], [Chunk(dim=0)])
    model._weight_conversions = [fused]
    groups = [group for group in stored_groups(model, saved_weights(model)) if len(group) > 1]
    prefix = "model.layers.0.self_attn"
    assert groups == [[f"{prefix}.{part}_proj.weight" for part in "qkv"]]
    own = saved_weights(model)
    (fused_weight,) = stored_state(model, {name: own[name] for name in groups[0]}).values()
    assert torch.equal(fused_weight, torch.cat([own[name] for name in groups[0]]))
    assert stored_layout(model)[f"{prefix}.qkv_proj.weight"].shape == (48, 16)


def tiny(folder: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)  # fmt: skip
    return load_causal_model(folder, **LOAD)  # type: ignore[return-value]


def test_a_tied_head_is_left_out_and_an_adapter_is_stored_alone(tmp_path: Path) -> None:
    assert "lm_head.weight" not in stored_layout(tiny(tmp_path))
    adapted = load_causal_model(tmp_path, lora=LoraConfig(rank=2), **LOAD)
    assert {name.rsplit(".", 2)[1] for name in stored_layout(adapted)} == {"lora_A", "lora_B"}


def test_a_saved_folder_has_the_files_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, also where the weights are too many for one file."""
    model = tiny(tmp_path / "model")
    for most, files in (("50GB", 1), ("4KB", 4)):
        monkeypatch.setattr(loading, "_MOST_OF_A_FILE", most)
        state = stored_state(model, saved_weights(model))
        save_state(model, state, tmp_path / f"ours {most}", None)
        model.save_pretrained(tmp_path / f"theirs {most}", max_shard_size=most)
        ours, theirs = (
            {path.name: path.read_bytes() for path in (tmp_path / f"{whose} {most}").iterdir()}
            for whose in ("ours", "theirs")
        )
        assert ours.keys() == theirs.keys()
        assert len([name for name in ours if name.endswith(".safetensors")]) == files
        assert {name for name in ours if ours[name] != theirs[name]} <= {"generation_config.json"}
        if files > 1:
            assert json.loads(ours["model.safetensors.index.json"])["weight_map"].keys() == state.keys()
