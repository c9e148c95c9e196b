"""Two real ranks: they compute what one computes, and skip together. Their side is two_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.small_models import small_config, small_model
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.supervised.examples import Shard
from rlhf_core.training.metrics import over_steps
from tests.rlhf_core.pictures import picture, vision_model
from tests.rlhf_core.stages.supervised_runs import base_model
from tests.rlhf_core.training.mixed_images import SPLITS, picture_and_text, trained_on_images
from tests.rlhf_core.training.muon_reference import reference_steps
from tests.rlhf_core.training.ranks import Answers, of, run_ranks
from tests.rlhf_core.training.supervised_step import METHODS, one_step
from tests.rlhf_core.training.tiny_engine import (
    GRADIENT,
    OPTIMIZER,
    SEQUENCES,
    TOKENS,
    batch,
    build,
    gradient,
    loss,
    tiny_model,
    weights_of,
)
from tests.rlhf_core.training.two_ranks import balanced_step, distillation_worker

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    tiny_model(path / "dense")
    tiny_model(path / "teacher", seed=1)
    torch.manual_seed(0)
    MixtralForCausalLM(
        MixtralConfig(
            vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=4, initializer_range=0.3,
        )
    ).save_pretrained(path / "experts")  # fmt: skip
    small_model(small_config("lfm2", vocab_size=23)).save_pretrained(path / "leaky")
    vision_model(path / "vision")
    base_model(path / "words")
    base_model(path / "other words", seed=1)
    for colour in ("red", "blue"):
        (path / colour).write_bytes(picture(colour))
    return path


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    return run_ranks("tests.rlhf_core.training.two_ranks", 2, folder, "essential")


@pytest.fixture(scope="module")
def further(folder: Path) -> Answers:
    return run_ranks("tests.rlhf_core.training.two_ranks", 2, folder, "further")


@pytest.mark.slow("starts two ranks for all tests of the file")
def test_both_ranks_get_metrics_over_both(answers: Answers) -> None:
    one, other = (numbers["metrics"] for numbers in answers[0])
    assert one == other
    assert one["micro_batches"] == 2 * 2
    assert one["rank"] == -4.0
    assert one["lucky"] == 3 / TOKENS


@pytest.mark.slow("starts ranks")
@pytest.mark.endurance("architectures")
def test_a_rank_without_a_picture_steps_with_one_that_has_one(folder: Path, further: Answers) -> None:
    alone = build(folder / "vision" / "model", optimizer=GRADIENT, zero_stage=0)
    norm = alone.step(picture_and_text(folder), loss).gradient_norm
    for numbers in further[0]:
        assert [numbers[f"images {stage}"]["norm"] for stage in (0, 2)] == pytest.approx([norm] * 2, rel=1e-4)
    got = of(further, "images 0")
    for name, value in gradient(alone).items():
        assert torch.allclose(got[name], value, atol=1e-5 * norm), name
    assert any("vision_model" in name and value.any() for name, value in got.items())


@pytest.mark.endurance("architectures")
@pytest.mark.parametrize("name", SPLITS)
def test_two_ranks_train_on_images_what_one_trains(folder: Path, further: Answers, tmp_path: Path, name: str) -> None:
    """Each rank has micro-batches with images where the other's have none."""
    settings, _ = SPLITS[name]
    alone = trained_on_images(folder, tmp_path, {**settings, "zero_stage": 0, "gradient_checkpointing": False})
    one, other = (numbers[f"images {name}"] for numbers in further[0])
    assert one["losses"] == other["losses"] == pytest.approx(alone.losses, rel=1e-5)
    assert (one["pictures"], other["pictures"]) == ([0, 0, 1], [2, 1, 0])
    before = load_file(folder / "vision" / "model" / "model.safetensors")
    found, wanted = of(further, f"images {name}"), weights_of(alone.engine)
    assert found.keys() == wanted.keys()
    for key, weight in wanted.items():
        if key.endswith("k_proj.bias"):
            continue  # of a softmax it changes nothing: its gradient is rounding, which AdamW enlarges
        change = (weight - before[key]).norm()
        assert (change > 0) != ("vision_model" in key and bool(settings.get("freeze_vision"))), key
        assert (found[key] - weight).norm() <= 1e-3 * change, key


def test_the_gradient_is_that_of_one_plain_pass(folder: Path, answers: Answers) -> None:
    model = load_causal_model(folder / "dense", dtype=torch.float64, attention="eager")
    loss(PolicyModel(model), batch())[0].backward()
    names = {key.split("/")[0] for key in answers[1] if key.startswith("gradient")}
    assert len(names) == 4 * 3
    for name in names:
        found = of(answers, name)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            distance = (found[key].double() - parameter.grad).norm()
            assert distance < 1e-5 * parameter.grad.norm(), f"{name}: {key}"


@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_both(answers: Answers, stage: int) -> None:
    for numbers in answers[0]:
        found = numbers[f"skipped {stage}"]
        assert found == {"skipped": True, "in a row": 1, "unchanged": True, "goes on": True}


@pytest.mark.parametrize("stage", [2, 3])
def test_muon_takes_the_reference_steps(folder: Path, answers: Answers, stage: int) -> None:
    found = of(answers, f"muon {stage}")
    for name, wanted in reference_steps(folder / "dense", 3).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("overlapping 2", {"overlap_comm": True, "hpz": 1}),
        ("overlapping 3", {"overlap_comm": True, "hpz": 1}),
        ("partitioned 3", {"overlap_comm": False, "hpz": 2}),
        ("resumed 3", {"overlap_comm": False, "hpz": 2}),
    ],
)
def test_how_ranks_communicate_changes_no_bit(answers: Answers, name: str, reached: dict[str, Any]) -> None:
    """Also after a resume, and with other weights in place of the trained ones."""
    plain = of(answers, f"communication plain {name[-1]}")
    for key, found in of(answers, f"communication {name}").items():
        assert torch.equal(found, plain[key]), key
    for numbers in answers[0]:
        assert numbers[f"communication {name}"]["reached"] == reached
        computed = numbers[f"communication {name}"]["computed"]
        assert computed == numbers[f"communication plain {name[-1]}"]["computed"]


@pytest.mark.endurance("architectures")
@pytest.mark.parametrize("what", ["optimizer", "everything"])
def test_offloading_changes_no_update(further: Answers, what: str) -> None:
    expected = of(further, "offload nothing")
    for name, found in of(further, f"offload {what}").items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-5, msg=name)
    metrics, plain = further[0][0][f"offload {what}"], further[0][0]["offload nothing"]
    assert metrics == pytest.approx(plain, rel=1e-5)
    assert plain["tokens"] == TOKENS


def test_experts_are_balanced_over_both(folder: Path, answers: Answers) -> None:
    engine = build(folder / "experts", optimizer=OPTIMIZER, zero_stage=0)
    for _ in range(2):
        expected = balanced_step(engine, [batch()])
    assert answers[0][0]["experts"] == pytest.approx(over_steps([expected]), rel=1e-5)
    weights = weights_of(engine)
    for name, found in of(answers, "experts").items():
        torch.testing.assert_close(found, weights[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.endurance("architectures")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_in_rows_makes_the_same_forwards_on_both(folder: Path, further: Answers, stage: int) -> None:
    one, other = (numbers[f"rows {stage}"] for numbers in further[0])
    norm = build(folder / "leaky", zero_stage=0).step([batch()], loss).gradient_norm
    assert one == {"layouts": "rows", "forwards": 4, "norm": pytest.approx(norm, rel=1e-5)}
    assert other == {**one, "forwards": 4 if stage == 3 else 1}


@pytest.mark.parametrize("worker", ["sft", "rl"])
def test_ranks_start_with_equal_weights_and_drop_out_differently(answers: Answers, worker: str) -> None:
    one, other = (numbers[f"dropout {worker}"] for numbers in answers[0])
    assert one["start"] == other["start"]
    assert any(one["start"])
    assert one["logprobs"] != other["logprobs"]


def test_validation_is_over_both_ranks_and_changes_nothing(folder: Path, answers: Answers) -> None:
    model = load_causal_model(folder / "dense", dtype=torch.float64, attention="eager")
    expected = float(loss(PolicyModel(model), batch())[0])
    one, other = (numbers["validation"] for numbers in answers[0])
    assert one["measured"] == other["measured"] == {"loss": pytest.approx(expected, rel=1e-5)}
    assert (one["unchanged"], other["unchanged"]) == (True, True)
    assert (one["kept"], other["kept"]) == (True, True)
    assert 0 < one["own"] < one["all"] == one["own"] + other["own"]


@pytest.mark.endurance("architectures")
@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_a_teacher_may_be_sharded(folder: Path, further: Answers, tmp_path: Path, name: str) -> None:
    worker = distillation_worker(folder, tmp_path, 0, 0)
    (metrics,) = worker.train([Shard([batch()], TOKENS, len(SEQUENCES))])
    wanted = {**metrics.means, "norm": metrics.gradient_norm}
    assert wanted["divergence"] > 1e-3
    for numbers in further[0]:
        assert numbers[f"distillation {name}"] == pytest.approx(wanted, rel=1e-5)
    weights = weights_of(worker.engine)
    for key, found in of(further, f"distillation {name}").items():
        torch.testing.assert_close(found, weights[key], rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.endurance("architectures")
@pytest.mark.parametrize("method", METHODS)
def test_a_step_of_each_method_is_that_of_one_rank(folder: Path, further: Answers, tmp_path: Path, method: str) -> None:
    """One rank's step is compared with plain torch in float64 in tests/rlhf_core/supervised."""
    worker, metrics = one_step(method, folder, tmp_path, zero_stage=0)
    wanted = {**metrics.means, "norm": metrics.gradient_norm}
    for name in {f"{method} 0", f"{method} 3"} & further[0][0].keys():
        one, other = (numbers[name] for numbers in further[0])
        assert one == other == pytest.approx(wanted, rel=1e-5)
    found = of(further, f"{method} 0")
    for name, value in gradient(worker.engine).items():
        assert (found[name] - value).norm() <= 1e-5 * metrics.gradient_norm, name
