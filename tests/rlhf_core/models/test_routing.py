"""Routing and load balancing of tiny Mixtral and Qwen3-MoE models, against transformers' own loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.division import filler
from rlhf_core.errors import StageError
from rlhf_core.losses.load_balancing import load_balancing_loss
from rlhf_core.models.layouts import PACKED, ROWS
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PackedModel, PolicyModel
from rlhf_core.models.routing import experts_per_token, routing_sums
from rlhf_core.packing import pack, select
from rlhf_core.types import PackedBatch

pytestmark = pytest.mark.endurance("architectures")

SEQUENCES = [[3, 1, 4, 1, 5], [9, 2], [2, 6, 5, 3, 5, 8, 9, 7], [6, 2, 6]]
SHAPE = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = (
        MixtralForCausalLM(MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SHAPE))
        if request.param == "mixtral"
        else Qwen3MoeForCausalLM(
            Qwen3MoeConfig(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=8, head_dim=8, **SHAPE)
        )
    )
    model.save_pretrained(path)
    return path


@pytest.fixture(params=[True, False], ids=["rows", "one row"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedModel, "layouts", ROWS if request.param else PACKED)


def batch() -> PackedBatch:
    return pack(SEQUENCES, [[i > 0 for i in range(len(sequence))] for sequence in SEQUENCES])


def load(folder: Path, *, checkpointing: bool = False) -> PreTrainedModel:
    model = load_causal_model(
        folder, dtype=torch.float32, attention="sdpa", gradient_checkpointing=checkpointing
    ).train()
    assert isinstance(model, PreTrainedModel)
    return model


def theirs(model: PreTrainedModel, sequences: list[list[int]]) -> Tensor:
    """transformers' loss of right-padded rows."""
    longest = max(map(len, sequences))
    ids = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    real = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
    loss: Tensor = model(input_ids=ids, attention_mask=real, output_router_logits=True).aux_loss
    return loss


def ours(model: PreTrainedModel, parts: list[PackedBatch]) -> Tensor:
    routings = [PolicyModel(model)(part, with_routing=True)[2] for part in parts]
    step = torch.stack(routings).sum(0)
    return torch.stack([load_balancing_loss(routing, step) for routing in routings]).sum()


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5 * scale + 1e-9, msg=name)


@pytest.mark.usefixtures("layout")
def test_one_sequence_has_the_loss_of_transformers_and_its_gradient(folder: Path) -> None:
    model = load(folder)
    for i, sequence in enumerate(SEQUENCES):
        expected = theirs(model, [sequence])
        loss = ours(model, [select(batch(), [i])])
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        wanted = gradients(model, expected)
        routers = [name for name in wanted if "gate.weight" in name]
        assert len(routers) == 2
        assert all(float(wanted[name].abs().max()) > 0 for name in routers)
        assert_close(gradients(model, loss), wanted)


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2, 0], [3, 1]]], ids=str)
def test_any_split_of_a_step_has_the_loss_of_its_padded_batch(
    folder: Path, split: list[list[int]], checkpointing: bool
) -> None:
    plain, model = load(folder), load(folder, checkpointing=checkpointing)
    expected = theirs(plain, SEQUENCES)
    parts = [select(batch(), part) for part in split]
    loss = ours(model, [*parts, filler(batch())])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradients(model, loss), gradients(plain, expected))


def test_it_is_not_recorded_unless_asked_for(folder: Path) -> None:
    model = load(folder)
    recorded: list[bool] = []
    model.model.register_forward_hook(lambda module, inputs, output: recorded.append("router_logits" in output))
    assert PolicyModel(model)(batch())[2] is None
    plain = PolicyModel(model)(batch())[0]
    assert torch.equal(PolicyModel(model)(batch(), with_routing=True)[0], plain)
    assert sum(recorded) == 1
    assert len(recorded) == 3 * 2  # the backbone, and its place in the head


def test_a_worked_example() -> None:
    """Two tokens, three experts, two chosen; a third token does not count."""
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.9, 0.05, 0.05]])
    sums = routing_sums([probabilities.log()], torch.tensor([True, True, False]), top_k=2)
    torch.testing.assert_close(sums, torch.tensor([[1, 2, 1], [0.6, 0.9, 0.5]]))
    # 3 ((1/2)(0.3) + (2/2)(0.45) + (1/2)(0.25))
    assert float(load_balancing_loss(sums, sums)) == pytest.approx(2.175)
    even = torch.tensor([[2.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert float(load_balancing_loss(even, even)) == pytest.approx(2.0)  # experts chosen a token: the least there is


def test_an_adapted_model_has_the_routers_of_its_base(folder: Path) -> None:
    adapted = load_causal_model(
        folder, dtype=torch.float32, attention="sdpa", lora=LoraConfig(rank=2, target_modules=("q_proj",))
    )
    assert experts_per_token(adapted) == experts_per_token(load(folder))
    assert ours(adapted, [batch()]).item() == pytest.approx(theirs(load(folder), SEQUENCES).item(), rel=1e-5)


def test_a_dense_model_is_refused(model_folder: Path) -> None:
    with pytest.raises(StageError, match=r"^moe_coefficient is set, but LlamaForCausalLM has no experts to balance; "):
        experts_per_token(load(model_folder))
