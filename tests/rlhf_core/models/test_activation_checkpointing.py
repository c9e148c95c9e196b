"""Models whose layers cannot be checkpointed selectively; tests/gpu/test_layouts.py has those that can."""

from __future__ import annotations

import pytest
import torch

from benchmarks.small_models import small_config, small_model
from rlhf_core.config.engines.training import GradientCheckpointing
from rlhf_core.errors import StageError
from rlhf_core.models.activation_checkpointing import checkpoint_layers
from rlhf_core.models.packed import PolicyModel

pytestmark = pytest.mark.parts


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("gemma3n_text", "changes gradients by"), ("gpt_oss", "raises RuntimeError: Tensor cached during selective")],
)
def test_a_model_whose_layers_change_what_was_kept_is_refused(model_type: str, why: str) -> None:
    model = small_model(small_config(model_type))
    checkpoint_layers(model, "selective")
    with pytest.raises(StageError, match=rf"^engine\.gradient_checkpointing: selective: .* {why}.*; set true$"):
        PolicyModel(model).check_layouts(torch.device("cpu"), selective=True)


@pytest.mark.parametrize("kind", [True, "selective"])
def test_a_model_without_such_layers_is_refused(kind: GradientCheckpointing) -> None:
    with pytest.raises(StageError, match=r"^engine\.gradient_checkpointing: .* of CTRLLMHeadModel again; remove it$"):
        checkpoint_layers(small_model(small_config("ctrl")), kind)
