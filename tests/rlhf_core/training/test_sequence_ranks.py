"""Ranks that share the tokens of each batch compute what one rank does. Their side is sequence_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.manifest import Kind
from tests.rlhf_core.rl.one_rank import tiny_llama
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.training.ranks import Answers, run_ranks
from tests.rlhf_core.training.sequence_ranks import BATCHES, HEADS, MODELS, WINDOWS, ppo, rl_step

pytestmark = pytest.mark.system


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.endurance("rl-matrix"))])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks: int) -> Path:
    path = tmp_path_factory.mktemp("sequence")
    tiny_llama(path / "policy")
    return path


@pytest.fixture(scope="module")
def answers(folder: Path, ranks: int) -> Answers:
    return run_ranks("tests.rlhf_core.training.sequence_ranks", ranks, folder, str(ranks), str(ranks))


def found(answers: Answers, prefix: str) -> list[dict[str, Any]]:
    return [value for numbers in answers[0] for name, value in numbers.items() if name.startswith(prefix)]


@pytest.mark.slow("starts the ranks for all tests of the file")
def test_attention_and_its_gradients_are_those_of_one_rank(answers: Answers, ranks: int) -> None:
    compared = found(answers, "attention")
    assert len(compared) == ranks * len(BATCHES) * len(HEADS) * len(WINDOWS)
    assert {one["by heads"] for one in compared} == {True, False}
    assert all(one["output"] < 1e-12 and one["gradient"] < 1e-12 for one in compared)


@pytest.mark.parametrize("kind", [*MODELS, "checkpoints True", "checkpoints selective"])
def test_models_and_their_gradients_are_those_of_one_rank(answers: Answers, ranks: int, kind: str) -> None:
    most = 1e-5 if kind == "experts" else 1e-12  # in float32, and in float64
    for one in found(answers, f"model {kind}"):
        assert (one["layouts"], one["without"]) == (f"tree over {ranks} ranks", 0)
        assert one["output"] < most
        assert one["gradient"] < most


@pytest.mark.parametrize("kind", ["rewards", "student"])
def test_other_heads_and_their_gradients_are_those_of_one_rank(answers: Answers, kind: str) -> None:
    for one in found(answers, kind):
        assert one["output"] < 1e-12
        assert one["gradient"] < 1e-12


def test_the_most_probable_tokens_are_those_of_one_rank(answers: Answers) -> None:
    assert found(answers, "top") == [{"equal": True, "rows": [32, 18, 0]}] * len(answers[0])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("lfm2", "a token tree makes a sequence depend on its neighbours"),
        ("phi3", "the factors of its positions depend on the longest sequence"),
        ("gemma2", "a token tree is for sdpa, which leaves out softcap"),
    ],
)
def test_models_whose_tokens_cannot_be_shared_are_refused(answers: Answers, kind: str, reason: str) -> None:
    for one in found(answers, f"refused {kind}"):
        assert one["reason"].startswith("engine.sequence_parallel: workers cannot share the tokens of")
        assert reason in one["reason"]


def test_an_exchange_into_transposed_memory_is_noticed_by_the_check(answers: Answers) -> None:
    for one in found(answers, "planted"):
        assert "makes a sequence depend on its neighbours" in one["reason"]


def test_a_step_of_ppo_is_that_of_one_rank(answers: Answers, folder: Path, tmp_path: Path) -> None:
    alone = rl_step(ppo(1), local_input(folder / "policy", Kind.POLICY), tmp_path)
    for one in found(answers, "rl"):
        assert one["values"] == pytest.approx(alone["values"], rel=1e-5, abs=1e-6)
        assert one["probe"] == pytest.approx(alone["probe"], rel=1e-5, abs=1e-5)
        for metrics, expected in zip(one["metrics"], alone["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
