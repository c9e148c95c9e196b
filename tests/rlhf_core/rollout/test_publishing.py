"""The bytes and folders of a publish, and the proof's judgement, without an engine of weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config.training import LoraConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.rollout.publishing import (
    ProbeAnswer,
    default_tolerance,
    serialize_weights,
    tensor_shapes,
    verify_weights,
    weights_folder,
)

SEQUENCES = [[1, 2, 3], [4, 5]]
EXPECTED = [[0.0, -1.0, -2.0], [0.0, -3.0]]


@dataclass
class Answering:
    """Engines that answer the probe with given log-probs."""

    answers: list[ProbeAnswer]

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[ProbeAnswer]:
        return self.answers


def test_a_folder_of_full_weights_holds_them_and_goes() -> None:
    state = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    with weights_folder(serialize_weights(state)) as folder:
        assert tensor_shapes(folder) == {"a.weight": (2, 3), "b": (4,)}
        loaded = load_file(folder / "model.safetensors")
        assert torch.equal(loaded["a.weight"], state["a.weight"])
        assert loaded["b"].dtype == torch.bfloat16
    assert not folder.exists()


def test_a_tied_tensor_is_published_once_and_a_transposed_one_as_it_reads() -> None:
    weight = torch.arange(4.0).reshape(2, 2)
    state = {"model.embed_tokens.weight": weight, "lm_head.weight": weight, "turned": torch.arange(6.0).reshape(2, 3).T}
    with weights_folder(serialize_weights(state, torch.bfloat16)) as folder:
        loaded = load_file(folder / "model.safetensors")
    assert set(loaded) == {"model.embed_tokens.weight", "turned"}
    assert loaded["turned"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert loaded["turned"].dtype == torch.bfloat16


def test_an_adapter_folder_is_what_peft_reads() -> None:
    prefix = "base_model.model.model.layers.0"
    state = {
        f"{prefix}.self_attn.q_proj.lora_A.weight": torch.ones(2, 4),
        f"{prefix}.self_attn.q_proj.lora_B.weight": torch.ones(4, 2),
        f"{prefix}.mlp.up_proj.lora_A.weight": torch.ones(2, 4),
        f"{prefix}.mlp.up_proj.lora_B.weight": torch.ones(4, 2),
    }
    with weights_folder(serialize_weights(state), LoraConfig(rank=2, alpha=8.0)) as folder:
        config = json.loads((folder / "adapter_config.json").read_text())
        assert set(load_file(folder / "adapter_model.safetensors")) == set(state)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 8.0, ["q_proj", "up_proj"])
    with (
        pytest.raises(WeightSyncError, match=r"`model.norm.weight` is no LoRA factor"),
        weights_folder(serialize_weights({"model.norm.weight": torch.ones(4)}), LoraConfig(rank=2)),
    ):
        pass


def test_the_worst_difference_of_all_engines_is_given_back() -> None:
    engines = Answering([
        ProbeAnswer("engine 0", 3, [[0.0, -1.0, -2.25], [0.0, -3.0]]),
        ProbeAnswer("engine 1", 3, [[9.0, -1.0, -2.0], [0.0, -3.5]]),  # the first of a sequence says nothing
    ])  # fmt: skip
    assert verify_weights(engines, SEQUENCES, EXPECTED, 3, 0.5) == 0.5


def test_what_is_off_is_named() -> None:
    good = ProbeAnswer("engine 0", 3, EXPECTED)
    off = ProbeAnswer("engine 1", 3, [[0.0, -1.0, -2.0], [0.0, -3.5]])
    with pytest.raises(WeightSyncError, match=r"engine 1 does not serve version 3 .* up to 0.5 \(tolerance 0.1\)"):
        verify_weights(Answering([good, off]), SEQUENCES, EXPECTED, 3, 0.1)
    old = ProbeAnswer("engine 1", 3, EXPECTED, tuple(f"t{i}" for i in range(10)))
    with pytest.raises(WeightSyncError, match=r"engine 1 .* up to 0 .* old values of t0, .*t7 and 2 more"):
        verify_weights(Answering([good, old]), SEQUENCES, EXPECTED, 3, 0.1)
    with pytest.raises(WeightSyncError, match="engine 0 serves version 3, but version 4 was published"):
        verify_weights(Answering([good]), SEQUENCES, EXPECTED, 4, 0.1)


def test_nan_never_passes() -> None:
    broken = ProbeAnswer("engine 0", 1, [[0.0, math.nan, -2.0], [0.0, -3.0]])
    with pytest.raises(WeightSyncError, match="off by up to nan"):
        verify_weights(Answering([broken]), SEQUENCES, EXPECTED, 1, 1e9)


def test_tolerances_grow_with_rounding() -> None:
    assert default_tolerance("float32") == 1e-3 < default_tolerance("bfloat16")
