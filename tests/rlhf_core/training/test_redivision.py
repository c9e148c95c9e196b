"""A run that resumes on other ranks, or at another ZeRO stage, has all of its state. Their side: redivided_ranks.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.errors import StageError
from rlhf_core.training.deepspeed_layouts import cut_together
from rlhf_core.training.redivision import redivided
from rlhf_core.training.state import Piece
from tests.rlhf_core.training.ranks import Answers, of, run_ranks
from tests.rlhf_core.training.redivided_ranks import CASES
from tests.rlhf_core.training.tiny_engine import tiny_model

pytestmark = pytest.mark.system


QUICK = ["stage 2", "stage 3", "from stage 3 to 2"]
SHARING = ["stage 0", "stage 2", "from stage 2 to 0"]  # of those that ranks which share weights can run


@pytest.mark.parametrize(
    ("before", "after", "tensor", "cases"),
    [
        (2, 1, 1, QUICK),
        pytest.param(1, 2, 1, [*CASES], marks=pytest.mark.endurance("two-nodes")),
        pytest.param(2, 4, 1, [*CASES], marks=pytest.mark.endurance("two-nodes")),
        pytest.param(2, 2, 1, ["from stage 0 to 3", "from stage 2 to 0"], marks=pytest.mark.endurance("two-nodes")),
        pytest.param(4, 2, 2, SHARING, marks=pytest.mark.endurance("two-nodes")),
        pytest.param(2, 4, 2, SHARING, marks=pytest.mark.endurance("two-nodes")),
    ],
)
@pytest.mark.slow("starts ranks three times")
def test_state_is_equal_to_the_bit_and_steps_to_rounding(
    before: int, after: int, tensor: int, cases: list[str], tmp_path: Path
) -> None:
    """tensor: ranks that share each weight."""
    tiny_model(tmp_path / "dense")

    def run(action: str, size: int) -> Answers:
        (tmp_path / action).mkdir()
        module = "tests.rlhf_core.training.redivided_ranks"
        return run_ranks(module, size, tmp_path / action, str(size), str(tensor), action, json.dumps(cases))

    began, continued, _ = run("begin", before), run("continue", after), run("return", before)
    for case in cases:
        expected, found = of(began, case), of(continued, case)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected), case
        assert continued[0][0][case] == began[0][0][case]  # rank 0 draws the next random numbers
        assert began[0][0][case]["kept"] != began[0][0][case]["average"]
        for numbers in continued[0][before:]:
            assert numbers[case]["random"] > 123  # as it was seeded
        losses = [numbers[f"{case}, later"]["losses"] for numbers in (*began[0], *continued[0])]
        assert losses == len(losses) * [pytest.approx(losses[0], rel=2e-2 if CASES[case][2] == "bfloat16" else 1e-4)]
        steps = [sorted((tmp_path / case).glob(f"store/**/{step:012d}-*/*.safetensors")) for step in (2, 4)]
        assert [path.name for path in steps[0]] == [path.name for path in steps[1]]
        for first, last in zip(*steps, strict=True):
            tensors, again = (
                {name: tensor for name, tensor in load_file(path).items() if not name.startswith("random.")}
                for path in (first, last)
            )
            assert tensors.keys() == again.keys()
            assert [name for name in tensors if not torch.equal(tensors[name], again[name])] == []


def test_parameters_in_a_row_are_cut_at_any_element() -> None:
    row = [("a", torch.zeros(2, 2)), ("b", torch.zeros(3)), ("c", torch.zeros(1))]
    cut = [cut_together(row, [0, 4, 8], rank, partition=5) for rank in range(2)]
    assert cut == [[Piece("a", 0, 0, 4), Piece("b", 0, 4, 1)], [Piece("b", 1, 0, 2), Piece("c", 0, 3, 1)]]


def test_a_checkpoint_of_ranks_that_share_weights_otherwise_is_refused() -> None:
    saved = {"rank0.safetensors": {"policy.weight.w": [Piece("w", 0, 0, 2, shard=0, shards=2)]}}
    with pytest.raises(StageError, match=r"written with engine\.tensor_parallel 2, and this run has 1: set it back"):
        redivided({"policy.weight.w": torch.zeros(4)}, {"policy.weight.w": [Piece("w", 0, 0, 4)]}, saved, Path)
