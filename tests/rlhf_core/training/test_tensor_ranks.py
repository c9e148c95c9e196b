"""Ranks that share the weights of each layer compute what one rank does. Their side is tensor_ranks.py."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.mesh import Mesh
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.training.ranks import Answer, Answers, of, run_ranks
from tests.rlhf_core.training.sequence_ranks import rl_step
from tests.rlhf_core.training.supervised_step import METHODS
from tests.rlhf_core.training.tensor_ranks import ASKED_OF_ONE, MODELS, STEPS, ppo, write_models
from tests.rlhf_core.training.tiny_engine import join_group

pytestmark = pytest.mark.system

# size, sequence, tensor
MESHES = {
    "two ranks": (2, 1, 2), "two replicas of two ranks": (4, 1, 2), "four ranks that share tokens too": (4, 2, 2),
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[name if size == 2 else pytest.param(name, marks=pytest.mark.endurance("rl-matrix"))
            for name, (size, _, _) in MESHES.items()],
)  # fmt: skip
def mesh(request: pytest.FixtureRequest) -> Mesh:
    size, sequence, tensor = MESHES[request.param]
    return Mesh(size // (sequence * tensor), sequence, tensor)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tensor")
    write_models(path)
    return path


@pytest.fixture(scope="module")
def answers(folder: Path, mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    own = tmp_path_factory.mktemp("ranks")
    for model in folder.iterdir():
        (own / model.name).symlink_to(model)
    sizes = map(str, (mesh.size, mesh.sequence, mesh.tensor))
    return run_ranks("tests.rlhf_core.training.tensor_ranks", mesh.size, own, *sizes)


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    join_group(rank=0, size=1)
    own = tmp_path_factory.mktemp("alone")
    for model in folder.iterdir():
        (own / model.name).symlink_to(model)
    return {answer[0]: answer for answer in chain.from_iterable(each(own) for each in ASKED_OF_ONE.values())}


@pytest.mark.slow("starts the ranks for all tests of the file")
@pytest.mark.parametrize("name", [*MODELS, "clipped qwen3", *METHODS])
def test_logprobs_and_gradients_are_those_of_one_rank(answers: Answers, alone: dict[str, Answer], name: str) -> None:
    _, numbers, expected = alone[f"gradient {name}"]
    found = of(answers, f"gradient {name}")
    for each in answers[0]:
        assert each[f"gradient {name}"]["norm"] == pytest.approx(numbers["norm"], rel=1e-5)
        if "size" in numbers:
            assert each[f"gradient {name}"]["size"] < numbers["size"]
    assert found.keys() == expected.keys()
    errors = {key: float((found[key] - value).norm() / value.norm()) for key, value in expected.items()}
    assert all(error < 1e-5 for error in errors.values()), errors
    if name.startswith("clipped"):
        assert numbers["norm"] > 0.5
        clipped = torch.stack([value.norm() for key, value in found.items() if key != "logprobs"]).norm()
        assert float(clipped) == pytest.approx(0.5, rel=1e-5)


@pytest.fixture
def shares_weights_alone(mesh: Mesh) -> None:
    if mesh.sequence > 1:
        pytest.skip("with tokens that are shared too, log-probs and gradients are compared")


def close(found: dict[str, Tensor], expected: dict[str, Tensor], most: float) -> bool:
    return all(float((found[name].float() - value.float()).abs().mean()) < most for name, value in expected.items())


@pytest.mark.usefixtures("shares_weights_alone")
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_one_rank(answers: Answers, alone: dict[str, Answer], name: str) -> None:
    _, numbers, expected = alone[f"steps {name}"]
    rounding = 0.1 if name == "bfloat16" else 1e-4
    digests = answers[0][0][f"steps {name}"]["digests"]
    for each in answers[0]:
        assert each[f"steps {name}"]["norms"] == pytest.approx(numbers["norms"], rel=rounding)
        assert each[f"steps {name}"]["digests"] == digests
    assert close(of(answers, f"steps {name}"), expected, 1e-2 if name == "bfloat16" else 1e-6)


@pytest.mark.usefixtures("shares_weights_alone")
def test_frozen_models_are_shared_too_and_yield_the_weights_of_their_folder(
    answers: Answers, alone: dict[str, Answer], folder: Path
) -> None:
    stored = load_file(folder / "qwen3" / "model.safetensors")
    for dtype, rounding in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        name = f"frozen {dtype}".replace("torch.", "")
        found = of(answers, name)
        assert (found.pop("logprobs") - alone[name][2]["logprobs"]).abs().max() < rounding
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[key], value.to(dtype)) for key, value in stored.items())
        assert answers[0][0][name]["size"] < alone[name][1]["size"]


@pytest.mark.usefixtures("shares_weights_alone")
def test_weights_are_replaced_and_restored_whole(answers: Answers) -> None:
    for each in answers[0]:
        assert each["replacing"] == {"layout": True, "masters": True, "inside": True, "restored": True}


@pytest.mark.usefixtures("shares_weights_alone")
@pytest.mark.parametrize("zero", [0, 2])
def test_a_checkpoint_resumes_to_the_bit_and_dropout_is_that_of_a_rank_alone(
    answers: Answers, alone: dict[str, Answer], mesh: Mesh, zero: int
) -> None:
    for each in answers[0]:
        found = each[f"resuming {zero}"]
        assert (found["damage"], found["equal"]) == ("", True)
        if mesh.data == 1:
            assert found["norm"] == pytest.approx(alone[f"resuming {zero}"][1]["norm"], rel=1e-4)


@pytest.mark.usefixtures("shares_weights_alone")
@pytest.mark.parametrize("zero", [0, 2])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all(answers: Answers, zero: int) -> None:
    for each in answers[0]:
        assert (each[f"skipping {zero}"]["skipped"], each[f"skipping {zero}"]["equal"]) == (True, True)


@pytest.mark.usefixtures("shares_weights_alone")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "mixtral",
            "workers would share layers of MixtralForCausalLM as moe_tp_experts, packed_colwise, for which",
        ),
        ("gpt2", "transformers has no plan of how workers share the layers of GPT2LMHeadModel: remove it"),
        ("phi3", "workers would share layers of Phi3ForCausalLM as colwise_gather_output, rowwise_split_input, for"),
        ("three heads", "2 workers cannot share 3 query heads (num_attention_heads) equally: set a number that div"),
    ],
)
def test_models_whose_weights_cannot_be_shared_are_refused(answers: Answers, kind: str, reason: str) -> None:
    for each in answers[0]:
        assert each[f"refused {kind}"]["reason"].startswith(f"engine.tensor_parallel: {reason}")


@pytest.mark.usefixtures("shares_weights_alone")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("local_logits", "cut over workers, Qwen2ForCausalLM has 3"),
        ("without_rows", "DeepSpeed has cut other layers than transformers' plan says"),
    ],
)
def test_layers_that_are_cut_otherwise_are_noticed(answers: Answers, fault: str, reason: str) -> None:
    for each in answers[0]:
        assert each[f"planted {fault}"]["reason"].startswith(f"engine.tensor_parallel: {reason}")


@pytest.mark.usefixtures("shares_weights_alone")
def test_a_step_of_ppo_is_that_of_one_rank(answers: Answers, folder: Path, mesh: Mesh, tmp_path: Path) -> None:
    if mesh.data > 1:
        pytest.skip("the driver of this test asks one replica")
    expected = rl_step(ppo(1), local_input(folder / "policy", Kind.POLICY), tmp_path)
    for each in answers[0]:
        assert each["rl"]["values"] == pytest.approx(expected["values"], rel=1e-5, abs=1e-6)
        assert each["rl"]["probe"] == pytest.approx(expected["probe"], rel=1e-5, abs=1e-5)
        for metrics, wanted in zip(each["rl"]["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)
