"""Replicas of several ranks: they compute what as many single ranks do. Their side is mesh_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.mesh import Mesh
from rlhf_core.training.metrics import over_steps
from tests.rlhf_core.training.mesh_ranks import STEPS
from tests.rlhf_core.training.ranks import Answers, of, run_ranks
from tests.rlhf_core.training.tiny_engine import (
    GRADIENT,
    SEQUENCES,
    TOKENS,
    batch,
    build,
    gradient,
    loss,
    tiny_model,
    weights_of,
)

pytestmark = pytest.mark.system

# size, sequence, tensor
MESHES = {"two replicas that share tokens": (4, 2, 1)}  # those that share weights: test_tensor_ranks.py


@pytest.fixture(scope="module", params=MESHES)
def mesh(request: pytest.FixtureRequest) -> Mesh:
    size, sequence, tensor = MESHES[request.param]
    return Mesh(size // (sequence * tensor), sequence, tensor)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, mesh: Mesh) -> Path:
    path = tmp_path_factory.mktemp("mesh")
    tiny_model(path / "dense")
    return path


@pytest.fixture(scope="module")
def answers(folder: Path, mesh: Mesh) -> Answers:
    sizes = map(str, (mesh.size, mesh.sequence, mesh.tensor))
    return run_ranks("tests.rlhf_core.training.mesh_ranks", mesh.size, folder, *sizes)


@pytest.mark.slow("starts the ranks for all tests of the file")
def test_ranks_of_a_replica_are_neighbours(answers: Answers, mesh: Mesh) -> None:
    places = [{"data": rank // 2, "sequence": rank % 2} for rank in range(mesh.size)]
    assert [numbers["mesh"] for numbers in answers[0]] == [
        {"replica": rank // 2, "data": mesh.data, "size": mesh.size, "places": places[rank]}
        for rank in range(mesh.size)
    ]  # fmt: skip


def test_sums_count_each_replica_once(folder: Path, answers: Answers, mesh: Mesh) -> None:
    alone = build(folder / "dense", optimizer=GRADIENT, zero_stage=0)
    step = over_steps([alone.step([batch()], loss)])
    for numbers in answers[0]:
        found = numbers["reductions"]
        assert found["tokens"] == TOKENS
        assert found["measured"] == pytest.approx({"loss": step["loss"], "tokens": TOKENS}, rel=1e-5)
        assert found["stepped"] == pytest.approx({
            "sequences": len(SEQUENCES), "replica": mesh.data - 6.0, "lucky": 3 / TOKENS,
            "gradient_norm": step["gradient_norm"], "learning_rate": step["learning_rate"], "skipped_updates": 0.0,
        }, rel=1e-5)  # fmt: skip
    for name, value in gradient(alone).items():
        assert (of(answers, "reductions")[name] - value).norm() <= 1e-5 * step["gradient_norm"], name


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_one_rank(folder: Path, answers: Answers, name: str) -> None:
    alone = build(folder / "dense", **STEPS[name])
    norms = [alone.step([batch()], loss).gradient_norm for _ in range(3)]
    for numbers in answers[0]:
        assert numbers[f"steps {name}"]["norms"] == pytest.approx(norms, rel=1e-4)
    found = of(answers, f"steps {name}")
    for key, weight in weights_of(alone).items():
        torch.testing.assert_close(found[key], weight, rtol=1e-4, atol=1e-4, msg=key)


def test_a_checkpoint_of_all_ranks_resumes_to_the_bit(answers: Answers, mesh: Mesh) -> None:
    for numbers in answers[0]:
        found = numbers["resuming"]
        names = [*(f"rank{rank}" for rank in range(mesh.size)), "shared"]
        assert found["files"] == [f"{name}.{ending}" for name in names for ending in ("layout.json", "safetensors")]
        assert (found["damage"], found["equal"]) == ("", True)


def test_ranks_with_other_tokens_draw_other_random_numbers(answers: Answers, mesh: Mesh) -> None:
    drawn = [numbers["random numbers"]["drawn"] for numbers in answers[0]]
    assert len({*drawn}) == mesh.data * mesh.sequence


def test_dropout_is_equal_inside_a_replica_and_differs_between_replicas(answers: Answers, mesh: Mesh) -> None:
    found = [numbers["resuming"] for numbers in answers[0]]
    replicas = [found[start : start + 2] for start in range(0, mesh.size, 2)]
    assert all(one["dropped"] == other["dropped"] for one, other in replicas)
    assert len({str(one["dropped"]) for one, _ in replicas}) == mesh.data
