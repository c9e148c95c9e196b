"""The reference of a training rank: the base under an adapter, another model, or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load as from_safetensors
from transformers import LlamaForCausalLM

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.contract import Input
from tests.rlhf_core.rl.one_rank import rl_config, trainer, trajectories, with_advantages
from tests.rlhf_core.rl.published import published
from tests.rlhf_core.stages.context import local_input

pytestmark = pytest.mark.parts


def test_the_reference_of_a_lora_policy_is_its_base_with_the_adapter_off(model: Input, tmp_path: Path) -> None:
    config = rl_config("grpo", kl={"coefficient": 0.1}, lora={"rank": 4})
    ours, _group = trainer(config, model, tmp_path)
    e = trajectories()
    before = torch.tensor(ours.probe(e))
    scored = ours.score(e)
    ours.update(with_advantages(config, ours, scored), 0)
    again = ours.score(e)
    assert again.ref_logprobs is not None
    torch.testing.assert_close(again.ref_logprobs, before * e.loss_mask, atol=1e-6, rtol=0)
    assert float((torch.tensor(ours.probe(e)) - before).abs().max()) > 1e-4
    base = LlamaForCausalLM.from_pretrained(model.folder).state_dict()
    merged = from_safetensors(published(ours))
    assert merged.keys() <= base.keys()
    moved = {name.split(".")[-2] for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_another_model_can_be_the_reference(lora: dict[str, int] | None, model: Input, tmp_path: Path) -> None:
    torch.manual_seed(2)
    LlamaForCausalLM(LlamaForCausalLM.from_pretrained(model.folder).config).save_pretrained(tmp_path / "other")
    other = local_input(tmp_path / "other", Kind.POLICY)
    config = rl_config("grpo", kl={"coefficient": 0.1, "reference": "other", "offload": True}, lora=lora)
    ours, _ = trainer(config, model, tmp_path / "work", {"grpo.kl.reference": other})
    scored = ours.score(trajectories())
    expected, _ = trainer(rl_config("grpo"), other, tmp_path / "alone")
    assert scored.ref_logprobs is not None
    e = trajectories()
    torch.testing.assert_close(scored.ref_logprobs, torch.tensor(expected.probe(e)) * e.loss_mask, atol=1e-6, rtol=0)


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_a_coefficient_of_zero_loads_no_reference(place: str, model: Input, tmp_path: Path) -> None:
    config = rl_config("ppo", kl={"coefficient": 0.0, "place": place}, epochs=2)
    ours, group = trainer(config, model, tmp_path)
    scored = ours.score(trajectories())
    assert not group._worker._frozen
    assert scored.ref_logprobs is None
    assert "kl_coefficient" not in ours.update(with_advantages(config, ours, scored), 0).metrics
