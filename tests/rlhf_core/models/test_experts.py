"""Mixture-of-experts models between memory, where transformers stacks the experts, and folders, where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import StageError
from rlhf_core.models.adapters import adapted_layers
from rlhf_core.models.loading import load_causal_model, load_scalar_model
from rlhf_core.models.merging import merge_adapter
from rlhf_core.models.stored import stored_state
from tests.rlhf_core.models.saved import save_state
from tests.rlhf_core.rollout.models import make_experts

pytestmark = pytest.mark.parts

FAMILIES = pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
LOAD = {"dtype": torch.float32, "attention": "sdpa"}
IDS = torch.tensor([[3, 1, 4, 1, 5]])
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]


@FAMILIES
def test_the_stored_state_has_the_names_and_values_of_the_folder(tmp_path: Path, family: str) -> None:
    make_experts(tmp_path, family)
    model = load_causal_model(tmp_path, **LOAD)
    state = model.state_dict()
    stored, folder = stored_state(model, state), load_file(tmp_path / "model.safetensors")
    assert any(tensor.ndim == 3 for tensor in state.values())  # if not, nothing is stacked and nothing to undo
    assert stored.keys() == folder.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in folder.items())


@FAMILIES
@pytest.mark.parametrize("load", [load_causal_model, load_scalar_model])
def test_merging_an_adapter_of_all_linear_layers(tmp_path: Path, family: str, load: type[object]) -> None:
    """They are those beside the experts; the experts stay, bit for bit, under their names on disk."""
    make_experts(tmp_path / "base", family)
    adapted = load(tmp_path / "base", lora=LoraConfig(rank=2), **LOAD)  # type: ignore[call-arg]
    assert isinstance(adapted, PeftModel)
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    state = get_peft_model_state_dict(adapted)
    assert {name.split(".")[-3] for name in state if "lora_" in name} == set(ATTENTION)
    save_state(adapted, state, tmp_path / "adapter", None)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = load(tmp_path / "merged", **LOAD)  # type: ignore[call-arg]
    torch.testing.assert_close(merged(input_ids=IDS).logits, adapted(input_ids=IDS).logits, rtol=0, atol=1e-5)  # type: ignore[operator]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    assert all(torch.equal(before[name], after[name]) for name in experts)


@pytest.mark.parametrize(
    "targets", [("gate_proj", "up_proj"), ("q_proj", "down_proj"), ("gate", "q_proj"), ("up_proj",)], ids=str
)
def test_adapters_of_experts_are_refused(tmp_path: Path, targets: tuple[str, ...]) -> None:
    make_experts(tmp_path, "qwen3_moe")
    with pytest.raises(StageError) as refused:
        load_causal_model(tmp_path, lora=LoraConfig(rank=2, target_modules=targets), **LOAD)
    if targets == ("up_proj",):  # peft's own error: it is half of a stacked tensor
        assert "without also targeting gate_proj" in str(refused.value)
    else:
        assert "cannot serve; name other layers, such as k_proj, o_proj, q_proj, v_proj, or" in str(refused.value)


def test_the_layers_of_a_dense_model_that_adapters_change(model_folder: Path) -> None:
    model = load_causal_model(model_folder, **LOAD)
    assert adapted_layers(model) == ["down_proj", "gate_proj", *ATTENTION[:3], "up_proj", "v_proj"]  # type: ignore[arg-type]
