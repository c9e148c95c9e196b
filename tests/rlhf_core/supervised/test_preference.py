"""The step of preference learning: its gradient is that of its sequences one by one in float64, however it is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.contract import Input
from rlhf_core.division import plan_micro_batches
from rlhf_core.packing import select
from rlhf_core.supervised.examples import Example, Shard, divide
from rlhf_core.supervised.pairs import pack_pairs, pair_example
from rlhf_core.supervised.preference import PreferenceWorker
from rlhf_core.training.distributed import join_group
from rlhf_core.training.reference import AdapterOff, FrozenCopy
from tests.rlhf_core.laid_out import Layout, use_layout
from tests.rlhf_core.stages.supervised_runs import ENGINE, base_model, context_of, pairs
from tests.rlhf_core.training.tiny_engine import GRADIENT, gradient

pytestmark = pytest.mark.parts

BETA, NLL = 0.3, 0.7
LOSSES = {"preference": {"type": "dpo", "beta": BETA}, "chosen": {"type": "nll", "weight": NLL}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("models")
    join_group(rank=0, size=1)
    return {"model": base_model(folder / "policy"), "reference.model": base_model(folder / "reference", seed=1)}


@pytest.fixture(scope="module")
def examples(inputs: dict[str, Input]) -> list[Example]:
    """Pairs of several lengths, two of them of one prompt."""
    tokenizer = load_tokenizer(inputs["model"].folder)
    rows = [*pairs(5), {**pairs(1)[0], "chosen": "a much longer answer", "rejected": "b"}]
    return [pair_example(tokenizer, {"id": str(index), **row}) for index, row in enumerate(rows)]


def worker(folder: Path, inputs: dict[str, Input], **settings: Any) -> PreferenceWorker:
    config = PreferenceConfig.model_validate({
        "dataset": "d", "batch_size": 6, "max_length": 64, "losses": LOSSES, "optimizer": GRADIENT, "engine": ENGINE,
        "reference": {"model": "other"}, **settings,
    })  # fmt: skip
    reference = inputs["reference.model" if config.reference.model else "model"].manifest.ref
    return PreferenceWorker(config, context_of(folder, inputs), inputs["model"].manifest.ref, 4, reference)


def dpo_and_nll(policies: list[Tensor], references: list[Tensor], example: Example) -> Tensor:
    difference = BETA * ((policies[0] - references[0]) - (policies[1] - references[1]))
    return -(logsigmoid(difference) + NLL * policies[0] / sum(example.masks[0]))


def rebel(policies: list[Tensor], references: list[Tensor], example: Example) -> Tensor:
    return (BETA * ((policies[0] - references[0]) - (policies[1] - references[1])) - example.margin) ** 2


def expected(
    inputs: dict[str, Input],
    examples: Sequence[Example],
    pair_loss: Callable[[list[Tensor], list[Tensor], Example], Tensor] = dpo_and_nll,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient in plain torch: the mean of `pair_loss` over the pairs."""
    load = AutoModelForCausalLM.from_pretrained
    policy = load(inputs["model"].folder, dtype=torch.float64, attn_implementation="eager")
    reference = load(inputs["reference.model"].folder, dtype=torch.float64, attn_implementation="eager")

    def logprob(model: Any, ids: list[int], mask: list[bool]) -> Tensor:
        found = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, :-1], dim=-1)
        return found.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0][torch.tensor(mask[1:])].sum()

    total = torch.zeros((), dtype=torch.float64)
    for example in examples:
        (chosen, rejected), masks = example.sequences, example.masks
        policies = [logprob(policy, ids, mask) for ids, mask in zip((chosen, rejected), masks, strict=True)]
        with torch.no_grad():
            references = [logprob(reference, ids, mask) for ids, mask in zip((chosen, rejected), masks, strict=True)]
        total = total + pair_loss(policies, references, example) / len(examples)
    total.backward()
    return total.item(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("ranks", "tokens", "layout"),
    [(1, 1000, "tree"), (1, 40, "rows"), (3, 60, "tree"), (4, 1, "tree"), (4, 1, "packed")],
)
def test_the_gradient_does_not_depend_on_the_split(
    inputs: dict[str, Input], examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    layout: Layout, ranks: int, tokens: int,
) -> None:  # fmt: skip
    use_layout(monkeypatch, layout)
    wanted_loss, wanted = expected(inputs, examples)
    shards = divide(pack_pairs(examples), ranks, tokens)
    if ranks == 4:
        assert any(not batch.num_trained_tokens for shard in shards for batch in shard.micro_batches), "no filler"
    # Gradients of ranks add up, as those of micro-batches do.
    everything = Shard(
        [batch for shard in shards for batch in shard.micro_batches], shards[0].num_tokens, shards[0].num_examples
    )
    one = worker(tmp_path, inputs)
    (metrics,) = one.train([everything])
    assert metrics.means["loss"] == pytest.approx(wanted_loss, rel=1e-5)
    assert metrics.means["loss"] == pytest.approx(
        metrics.means["loss/preference"] + NLL * metrics.means["loss/chosen"], rel=1e-5
    )
    found = gradient(one.engine)
    assert found.keys() == wanted.keys()
    whole = torch.stack([value.norm() for value in wanted.values()]).norm()
    distance = torch.stack([(found[name] - value).norm() for name, value in wanted.items()]).norm()
    assert distance <= 1e-5 * whole


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 1000), (4, 1)])
def test_each_pair_meets_its_margin_on_every_rank(
    inputs: dict[str, Input], examples: list[Example], tmp_path: Path, ranks: int, tokens: int
) -> None:
    """REBEL, in one micro-batch, and on four ranks of which some have a filler."""
    apart = [replace(example, margin=0.75 * index - 1) for index, example in enumerate(examples)]
    wanted_loss, wanted = expected(inputs, apart, rebel)
    shards = divide(pack_pairs(apart), ranks, tokens)
    batches = [batch for shard in shards for batch in shard.micro_batches]
    assert any(not batch.num_trained_tokens for batch in batches) == (ranks == 4), "no filler"
    one = worker(tmp_path, inputs, losses={"rebel": {"type": "rebel", "beta": BETA}})
    (metrics,) = one.train([Shard(batches, shards[0].num_tokens, shards[0].num_examples)])
    assert metrics.means["loss"] == pytest.approx(wanted_loss, rel=1e-5)
    found = gradient(one.engine)
    whole = torch.stack([value.norm() for value in wanted.values()]).norm()
    assert torch.stack([(found[name] - value).norm() for name, value in wanted.items()]).norm() <= 1e-5 * whole


def test_a_pair_that_is_left_out_shows(inputs: dict[str, Input], examples: list[Example], tmp_path: Path) -> None:
    wanted_loss, _ = expected(inputs, examples)
    batch = select(pack_pairs(examples), range(5))
    (metrics,) = worker(tmp_path, inputs).train([Shard([batch], batch.num_trained_tokens, len(examples))])
    assert metrics.means["loss"] < 0.95 * wanted_loss
    assert len(plan_micro_batches([9], replicas=1, tokens_per_micro_batch=1)[0]) == 1


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_policy_that_is_its_reference_gives_no_rewards(
    inputs: dict[str, Input], examples: list[Example], tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    """To the bit, so that rounding counts as no preference; an adapter needs no second copy of the weights for it."""
    one = worker(tmp_path, inputs, reference={}, lora=lora, losses={"dpo": LOSSES["preference"]})
    assert isinstance(one._reference, FrozenCopy if lora is None else AdapterOff)
    (shard,) = divide(pack_pairs(examples), 1, 60)
    assert len(shard.micro_batches) > 1
    for measured in (one.validate(shard), one.train([shard])[0].means):
        assert measured["chosen_reward"] == measured["rejected_reward"] == measured["accuracy"] == 0.0
        assert measured["loss"] == pytest.approx(-logsigmoid(torch.zeros(())).item(), rel=1e-6)
        assert measured["chosen_logprob"] < -0.1
