"""The gradient of an optimizer step is that of its sequences one by one, however they are split, packed or padded.

The reference runs each sequence alone, in float64 and in plain torch. Ranks are simulated here: their gradients add up.
Two real ones are in test_two_ranks.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from rlhf_core.config.engines.training import GradientCheckpointing
from rlhf_core.division import filler, plan_micro_batches
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.models import token_tree
from rlhf_core.packing import pack, select
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.types import Minibatch, PackedBatch
from tests.rlhf_core.laid_out import LAYOUTS, Layout, use_layout
from tests.rlhf_core.training.tiny_engine import GRADIENT, build, gradient, tiny_model

pytestmark = pytest.mark.endurance("architectures")

TEMPERATURE, ENTROPY = 0.7, 0.3
CHECKPOINTING: tuple[GradientCheckpointing, ...] = (False, True, "selective")
Engines = dict[tuple[Layout, GradientCheckpointing], DeepSpeedEngine]


@dataclass(frozen=True)
class Split:
    """Which sequences each micro-batch of all ranks holds; an empty one stands for a filler."""

    micro_batches: list[list[int]]
    layout: Layout
    checkpointing: GradientCheckpointing


@dataclass(frozen=True)
class Example:
    experience: Minibatch
    split: Split


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """A batch of up to 7 sequences, some of whose tokens are trained, weighted at random, and a way to split it.

    Some begin as others do.
    """
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=7).filter(lambda found: max(found) > 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = [torch.randint(23, (length,), generator=generator) for length in lengths]
    for i, stem in enumerate(draw(st.lists(st.integers(0, 12), max_size=len(ids)))):
        shared = min(len(ids[i]), len(ids[i - 1]), stem)
        ids[i][:shared] = ids[i - 1][:shared]
    masks = [(torch.rand(length, generator=generator) < 0.7) & (torch.arange(length) > 0) for length in lengths]
    masks[lengths.index(max(lengths))][1] = True
    batch = pack(ids, masks)
    weights = (torch.rand(batch.num_tokens, generator=generator) - 0.3) * batch.loss_mask
    experience = minibatch(batch, weights)
    return Example(
        experience,
        Split(
            draw(st.one_of(planned(lengths), anyhow(len(lengths)))),
            draw(st.sampled_from(LAYOUTS)),
            draw(st.sampled_from(CHECKPOINTING)),
        ),
    )


@st.composite
def planned(draw: st.DrawFn, lengths: Sequence[int]) -> list[list[int]]:
    """As the trainer splits it, on up to three ranks."""
    plan = plan_micro_batches(
        lengths, replicas=draw(st.integers(1, 3)), tokens_per_micro_batch=draw(st.integers(1, 2 * sum(lengths)))
    )
    return [part for rank in plan for part in rank]


@st.composite
def anyhow(draw: st.DrawFn, count: int) -> list[list[int]]:
    """In any order, cut anywhere."""
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=count))) if count > 1 else []
    return [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, count], strict=True)]


def minibatch(batch: PackedBatch, weights: Tensor) -> Minibatch:
    nothing = torch.zeros(batch.num_tokens)
    return Minibatch(**vars(batch), rollout_logprobs=nothing, advantages=nothing, loss_weights=weights)


def loss(model: nn.Module, batch: Minibatch) -> LossAndMetrics:
    logprobs, entropy, _ = model(batch, temperature=TEMPERATURE, with_entropy=True, only=batch.loss_mask)
    return -((logprobs + ENTROPY * entropy) * batch.loss_weights).sum(), {}


def plain_gradient(model: LlamaForCausalLM, experience: Minibatch) -> dict[str, Tensor]:
    model.zero_grad()
    lengths = experience.sequence_lengths.tolist()
    for ids, weights in zip(experience.input_ids.split(lengths), experience.loss_weights.split(lengths), strict=True):
        if len(ids) > 1:
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE, dim=-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            chosen = logprobs.gather(-1, ids[1:, None])[:, 0]
            (-(chosen + ENTROPY * entropy) * weights[1:].double()).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    return folder, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


@pytest.fixture(scope="module")
def engines(reference: tuple[Path, LlamaForCausalLM]) -> Engines:
    """Of each layout and kind of gradient checkpointing; their weights stay as they are."""
    built = {}
    for layout, checkpointing in itertools.product(LAYOUTS, CHECKPOINTING):
        with pytest.MonkeyPatch.context() as patch:
            use_layout(patch, layout)
            built[layout, checkpointing] = build(
                reference[0], optimizer=GRADIENT, zero_stage=0, gradient_checkpointing=checkpointing
            )
    return built


def split_gradient(engines: Engines, example: Example, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    use_layout(monkeypatch, example.split.layout)
    monkeypatch.setattr(token_tree, "LEAST_SHARED", 2)
    whole = example.experience
    parts: list[PackedBatch] = [select(whole, part) if part else filler(whole) for part in example.split.micro_batches]
    engine = engines[example.split.layout, example.split.checkpointing]
    engine.step(parts, loss)
    return gradient(engine)


@settings(max_examples=60, deadline=None)
@given(example=examples())
def test_the_gradient_does_not_depend_on_the_split(
    example: Example, reference: tuple[Path, LlamaForCausalLM], engines: Engines
) -> None:
    expected = plain_gradient(reference[1], example.experience)
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = split_gradient(engines, example, monkeypatch)
    assert found.keys() == expected.keys()
    whole = torch.stack([wanted.norm() for wanted in expected.values()]).norm()
    distance = torch.stack([(found[name] - wanted).norm() for name, wanted in expected.items()]).norm()
    assert distance <= 1e-5 * whole
    for name, wanted in expected.items():
        assert (found[name] - wanted).norm() <= 1e-5 * wanted.norm() + 1e-6 * whole, name


def test_the_test_can_fail(
    reference: tuple[Path, LlamaForCausalLM],
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sequence that is left out, or counted for another, shows."""
    batch = pack([[3, 1, 4], [1, 5, 9]], [[False, True, True]] * 2)
    experience = minibatch(batch, batch.loss_mask.float())
    expected = plain_gradient(reference[1], experience)
    for wrong in ([[0]], [[0], [0]]):
        found = split_gradient(engines, Example(experience, Split(wrong, "tree", checkpointing=False)), monkeypatch)
        assert any((found[name] - wanted).norm() > 1e-2 * wanted.norm() for name, wanted in expected.items())
