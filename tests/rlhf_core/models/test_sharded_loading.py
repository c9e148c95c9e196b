"""Division of a model's weights as they are read, without ranks. tests/rlhf_core/training has the same with them."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_core.errors import StageError
from rlhf_core.models import sharded_loading
from rlhf_core.models.loading import load_causal_model
from tests.rlhf_core.models.conftest import write_model
from tests.rlhf_core.rollout.models import make_experts

pytestmark = pytest.mark.parts

LOAD = {"dtype": torch.bfloat16, "attention": "sdpa"}


class Emptied:
    """A sharding that leaves nothing of a parameter on this rank."""

    def __init__(self) -> None:
        self.divided: list[Tensor] = []

    def divide(self, parameter: nn.Parameter) -> None:
        self.divided.append(parameter.data)
        parameter.data = torch.empty(0, dtype=parameter.dtype)
        parameter.ds_id = 0  # type: ignore[attr-defined]


def test_every_weight_is_divided_once_and_later_ones_are_not(model_folder: Path) -> None:
    expected = load_causal_model(model_folder, **LOAD)
    sharding = Emptied()
    model = load_causal_model(model_folder, sharding=sharding, **LOAD)
    assert len(sharding.divided) == len(list(model.parameters()))
    sums = [
        sorted(float(t.detach().double().sum()) for t in each) for each in (sharding.divided, expected.parameters())
    ]
    assert sums[0] == sums[1]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    nn.Module().register_parameter("later", next(expected.parameters()))
    assert len(sharding.divided) == len(list(model.parameters()))
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


@pytest.mark.parametrize("experts", [False, True])
def test_a_tensor_is_read_when_those_before_it_are_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: bool
) -> None:
    """The experts of a layer, 4 with 2 tensors each, are read together: they are one tensor in memory."""
    make_experts(tmp_path, "qwen3_moe") if experts else write_model(tmp_path, tied=False)
    sharding, most = Emptied(), 0
    read: list[int] = []
    given = sharded_loading._stored

    class Counted:
        def __init__(self, part: Any) -> None:
            self._part = part

        def __getitem__(self, index: object) -> Tensor:
            nonlocal most
            read.append(len(sharding.divided))
            most = max(most, read.count(len(sharding.divided)))
            tensor: Tensor = self._part[index]
            return tensor

    def counted(stack: ExitStack, folder: Path) -> dict[str, Any]:
        return {name: Counted(part) for name, part in given(stack, folder).items()}

    monkeypatch.setattr(sharded_loading, "_stored", counted)
    load_causal_model(tmp_path, sharding=sharding, **LOAD)
    assert most == (8 if experts else 1)
    assert len(read) == len(load_file(tmp_path / "model.safetensors"))


def test_weights_that_do_not_fit_are_found_before_any_is_divided(tmp_path: Path) -> None:
    write_model(tmp_path, tied=False)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    sharding = Emptied()
    with pytest.raises(StageError, match=r"missing are model\.norm\.weight"):
        load_causal_model(tmp_path, sharding=sharding, **LOAD)
    assert not sharding.divided


def test_a_stored_head_that_is_not_the_embedding_is_refused(tmp_path: Path) -> None:
    """Divided tensors are empty on a rank, and so look equal to transformers."""
    write_model(tmp_path, tied=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(StageError, match="lm_head"):
        load_causal_model(tmp_path, sharding=Emptied(), **LOAD)
