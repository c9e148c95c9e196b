"""A model whose weights are divided as they are read is the one that every rank loads whole. See sharded_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.models.loading import load_scalar_model
from tests.rlhf_core.models.conftest import write_model
from tests.rlhf_core.rollout.models import make_experts
from tests.rlhf_core.training.ranks import Answers, run_ranks
from tests.rlhf_core.training.sharded_ranks import CASES

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    write_model(path / "tied", tied=True, dtype=torch.bfloat16)
    write_model(path / "untied", tied=False)
    make_experts(path / "experts", "qwen3_moe")
    load_scalar_model(path / "untied", dtype=torch.float32, attention="sdpa", seed=3).save_pretrained(path / "scalar")
    return path


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    return run_ranks("tests.rlhf_core.training.sharded_ranks", 2, folder)


@pytest.mark.slow("starts two ranks for all tests of the file")
@pytest.mark.parametrize("case", CASES)
def test_weights_buffers_outputs_and_steps_are_the_same(folder: Path, answers: Answers, case: str) -> None:
    for numbers in answers[0]:
        assert numbers[case]["different"] == []
        assert all("lora_" in name or "score" in name for name in numbers[case]["whole"])
    plain, sharded = (
        {path.name: path.read_bytes() for path in (folder / f"{case} {way} 0").iterdir()}
        for way in ("whole", "sharded")
    )
    assert plain == sharded


def test_rounded_buffers_change_the_outputs_though_every_weight_is_right(answers: Answers) -> None:
    for numbers in answers[0]:
        buffers = [f"before: buffer model.model.rotary_emb.{name}" for name in ("inv_freq", "original_inv_freq")]
        assert sorted(numbers["rounded"]["different"]) == [*buffers, "outputs"]
