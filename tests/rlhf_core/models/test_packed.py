"""A packed batch has the same results as its sequences one by one, in either layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from rlhf_core.config.engines.training import GradientCheckpointing
from rlhf_core.models.layouts import PACKED, ROWS, rows_are_cheaper
from rlhf_core.models.loading import load_causal_model, load_scalar_model
from rlhf_core.models.packed import PackedModel, PolicyModel, ScalarModel
from rlhf_core.packing import pack
from rlhf_core.types import PackedBatch

pytestmark = pytest.mark.parts

SEQUENCES = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7], [30, 2]]


def batch() -> PackedBatch:
    return pack(SEQUENCES, [[i >= 2 for i in range(len(sequence))] for sequence in SEQUENCES])


@pytest.fixture(params=[True, False], ids=["rows", "one row"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(PackedModel, "layouts", ROWS if request.param else PACKED)
    return bool(request.param)


def one_by_one(folder: Path, temperature: float = 1.0) -> tuple[LlamaForCausalLM, Tensor, Tensor]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    values, entropies = [], []
    for sequence in SEQUENCES:
        ids = torch.tensor([sequence])
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, dim=-1)
        values.append(torch.cat([torch.zeros(1), logprobs.gather(-1, ids[0, 1:, None])[:, 0]]))
        entropies.append(torch.cat([torch.zeros(1), -(logprobs.exp() * logprobs).sum(-1)]))
    return model, torch.cat(values), torch.cat(entropies)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_and_entropy_equal_single_sequences(
    model_folder: Path, layout: bool, attention: str, temperature: float
) -> None:
    _, expected, expected_entropy = one_by_one(model_folder, temperature)
    model = PolicyModel(load_causal_model(model_folder, dtype=torch.float32, attention=attention))
    logprobs, entropy, _ = model(batch(), temperature=temperature, with_entropy=True)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-5)
    assert logprobs[batch().position_ids == 0].tolist() == [0.0] * 4
    assert model(batch())[1] is None


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_gradients_equal_single_sequences(
    untied_folder: Path, layout: bool, checkpointing: GradientCheckpointing
) -> None:
    plain, expected, _ = one_by_one(untied_folder)
    weights = torch.linspace(-1, 1, batch().num_tokens)
    (expected * weights).sum().backward()
    causal = load_causal_model(
        untied_folder, dtype=torch.float32, attention="sdpa", gradient_checkpointing=checkpointing
    ).train()
    (PolicyModel(causal, chunk_elements=100)(batch())[0] * weights).sum().backward()
    for (name, got), wanted in zip(causal.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_only_the_tokens_asked_for_are_computed(model_folder: Path) -> None:
    model = PolicyModel(load_causal_model(model_folder, dtype=torch.float32, attention="sdpa"))
    rows: list[int] = []
    model.model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[-2]))
    everything, *_ = model(batch())
    masked, entropy, _ = model(batch(), only=batch().loss_mask, with_entropy=True)
    assert rows == [16 - 4, int(batch().loss_mask.sum())]
    torch.testing.assert_close(masked, everything * batch().loss_mask, rtol=0, atol=1e-6)
    assert entropy is not None
    assert entropy[~batch().loss_mask].abs().sum() == 0
    nothing, *_ = model(batch(), only=torch.zeros(16, dtype=torch.bool))
    assert nothing.tolist() == [0.0] * 16


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scores_equal_single_sequences(model_folder: Path, layout: bool, attention: str) -> None:
    classifier = load_scalar_model(model_folder, dtype=torch.float32, attention=attention)
    scores = ScalarModel(classifier)(batch())
    assert scores.shape == (16,)
    assert scores.dtype == torch.float32
    last = scores[batch().last_token_indices]
    expected = [classifier(input_ids=torch.tensor([sequence])).logits.item() for sequence in SEQUENCES]
    assert last.tolist() == pytest.approx(expected, abs=1e-5)
    prefix = classifier(input_ids=torch.tensor([SEQUENCES[2][:3]])).logits.item()
    assert scores[8].item() == pytest.approx(prefix, abs=1e-5)


def test_bfloat16_is_near_float32(model_folder: Path, layout: bool) -> None:
    _, expected, _ = one_by_one(model_folder)
    model = PolicyModel(load_causal_model(model_folder, dtype=torch.bfloat16, attention="sdpa"))
    logprobs, *_ = model(batch())
    assert logprobs.dtype == torch.float32
    assert (logprobs - expected).abs().max() < 0.1
    assert (logprobs - expected).abs().mean() < 0.02


def test_many_short_sequences_become_rows_and_a_long_one_among_short_ones_does_not(model_folder: Path) -> None:
    model = load_causal_model(model_folder, dtype=torch.float32, attention="sdpa")
    short = pack([[1] * 20] * 100, [[True] * 20] * 100)
    mixed = pack([[1] * 2000] + [[1] * 4] * 100, [[True] * 2000] + [[True] * 4] * 100)
    assert rows_are_cheaper(model, short)
    assert not rows_are_cheaper(model, mixed)
    assert not rows_are_cheaper(model, pack([[1] * 9], [[True] * 9]))
