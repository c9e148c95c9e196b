"""Layers that compute some of their activations again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.architectures import ragged_batch
from benchmarks.small_models import small_config, small_model
from rlhf_core.config.engine import GradientCheckpointing
from rlhf_core.errors import StageError
from rlhf_core.models.checkpointing import checkpoint_layers
from rlhf_core.models.dropout import set_train_mode
from rlhf_core.models.packed import PolicyModel
from tests.rlhf_core.models.test_devices import CPU, EACH


def gradient_and_kept(policy: PolicyModel) -> tuple[Tensor, int]:
    """Of all weights, and how many bytes its forward has kept for that."""
    batch = ragged_batch(policy.model.config.get_text_config().vocab_size).to(policy.model.device)
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    set_train_mode(policy, dropout=False)
    policy.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logprobs = policy(batch)[0]
    logprobs.sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]), sum(kept.values())


@EACH
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gemma2", "mamba2"])
def test_what_is_computed_again_is_the_same(model_type: str, device: torch.device) -> None:
    plain, selective = (PolicyModel(small_model(small_config(model_type)).to(device)) for _ in range(2))
    checkpoint_layers(selective.model, "selective")
    plain.check_layouts(device)
    selective.check_layouts(device, selective=True)
    assert selective.layouts == plain.layouts
    (expected, all_of_it), (found, kept) = gradient_and_kept(plain), gradient_and_kept(selective)
    assert kept < 0.8 * all_of_it
    if device == CPU:
        assert found.equal(expected)
    else:  # where sums are in the order in which threads end
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("gemma3n_text", "changes gradients by"), ("gpt_oss", "raises RuntimeError: Tensor cached during selective")],
)
def test_a_model_whose_layers_change_what_was_kept_is_refused(model_type: str, why: str) -> None:
    model = small_model(small_config(model_type))
    checkpoint_layers(model, "selective")
    with pytest.raises(StageError, match=rf"^engine\.gradient_checkpointing: selective: .* {why}.*; set true$"):
        PolicyModel(model).check_layouts(CPU, selective=True)


@pytest.mark.parametrize("kind", [True, "selective"])
def test_a_model_without_such_layers_is_refused(kind: GradientCheckpointing) -> None:
    with pytest.raises(
        StageError, match=r"^engine\.gradient_checkpointing: .* of CTRLLMHeadModel again; leave it out$"
    ):
        checkpoint_layers(small_model(small_config("ctrl")), kind)
