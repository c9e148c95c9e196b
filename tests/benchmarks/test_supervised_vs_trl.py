"""DPO and SFT against TRL: that the work is what it says, and how each side counts it. TRL need not be installed."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.against_trl import parse, plan
from benchmarks.dpo_vs_trl import BENCHMARK as DPO
from benchmarks.sft_vs_trl import BENCHMARK as SFT
from benchmarks.supervised_ours import config, dataset
from benchmarks.supervised_trl import StepCounter, counts
from benchmarks.supervised_workload import MARKS, SupervisedWorkload, result, rows
from benchmarks.word_models import tokenizer
from rlhf_core.supervised.pairs import pair_example
from rlhf_core.supervised.sft import conversation_examples

pytestmark = pytest.mark.endurance("benchmarks")

PAIRS = SupervisedWorkload("1m", "float32", method="dpo", batch=4, warm_up=1, steps=2)
TALKS = replace(PAIRS, method="sft")


def words(row: dict[str, Any], *names: str) -> list[int]:
    return [len(row[name].split()) for name in names]


def test_rows_are_the_same_every_time_and_as_long_as_said() -> None:
    many = replace(PAIRS, batch=400)
    made = rows(many)
    assert made == rows(many)
    assert len(made) == 1200
    completions = [length for row in made for length in words(row, "chosen", "rejected")]
    prompts = [len(row["prompt"][0]["content"].split()) for row in made]
    assert statistics.median(prompts) == pytest.approx(64, rel=0.05)
    assert statistics.median(completions) == pytest.approx(128, rel=0.05)
    assert max(p + max(words(row, "chosen", "rejected")) for p, row in zip(prompts, made, strict=True)) <= 1024 - MARKS
    assert sorted(completions)[-120] > 2 * statistics.median(completions)  # a long tail, as real data have


def test_our_examples_are_the_rows_with_their_marks() -> None:
    made = tokenizer(PAIRS.shape.vocabulary)
    for row, pair in zip(rows(PAIRS), dataset(PAIRS), strict=True):
        example = pair_example(made, pair)
        assert [sum(mask) for mask in example.masks] == [length + 1 for length in words(row, "chosen", "rejected")]
        assert example.num_tokens == sum(
            len(row["prompt"][0]["content"].split()) + length + MARKS for length in words(row, "chosen", "rejected")
        )
    for row, talk in zip(rows(TALKS), dataset(TALKS), strict=True):
        (example,) = conversation_examples(made, talk)
        assert example.num_trained_tokens == words(row, "completion")[0] + 1


def test_trl_counts_real_tokens_of_padded_pairs_and_of_packed_sequences() -> None:
    padded = {
        "input_ids": torch.ones(2, 5),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "completion_mask": torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]),
    }
    assert counts(padded) == {"examples": 1, "tokens": 8, "trained": 4}
    packed = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1]]),
        "labels": torch.tensor([[-100, 7, 8, -100, 9]]),
    }
    assert counts(packed) == {"examples": 2, "tokens": 5, "trained": 3}


def test_trl_adds_up_the_micro_batches_of_a_step() -> None:
    counter = StepCounter()
    step = counter.watched(lambda model, inputs: torch.tensor(0.25))
    packed = {"position_ids": torch.tensor([[0, 1]]), "labels": torch.tensor([[-100, 7]])}
    step(None, packed)
    step(None, packed)
    counter.ended.append(1.0)
    step(None, packed)
    assert counter.losses == [0.5, 0.25]
    assert counter.steps == [
        {"examples": 2, "tokens": 4, "trained": 2}, {"examples": 1, "tokens": 2, "trained": 1}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("work", "amounts", "losses"),
    [(PAIRS, [4, 4], [0.7, 0.6, 0.5]), (TALKS, [60, 70], [pytest.approx((0.7 * 1 + 0.6 * 2 + 0.5 * 3) / 6)])],
    ids=["dpo", "sft"],
)
def test_pairs_or_tokens_are_counted(work: SupervisedWorkload, amounts: list[int], losses: list[float]) -> None:
    steps = [{"examples": 4, "tokens": 50 + 10 * i, "trained": i + 1} for i in range(3)]
    found = result(work, [(1.0, 0.7), (2.0, 0.6), (3.0, 0.5)], steps, {})
    assert [step.amount for step in found.steps] == amounts
    assert found.consumed == {"examples": 12, "tokens": 180, "trained": 6}
    assert found.losses == losses


def test_the_stages_are_asked_for_the_same_work() -> None:
    (pairs, _), *_ = plan(DPO, parse(DPO, ["--sizes", "1m", "--batch", "8"]))
    (talks, _), *_ = plan(SFT, parse(SFT, ["--sizes", "1m"]))
    assert (pairs.method, pairs.batch, talks.method, talks.batch) == ("dpo", 8, "sft", 32)
    asked = config(pairs, "ours")
    assert (asked.batch_size, asked.max_length, asked.optimizer.betas, asked.epochs) == (8, 1024, (0.9, 0.95), 1)
    assert not config(talks, "ours").engine.gradient_checkpointing
    with pytest.raises(ValueError, match="trl_micro_batch 3 does not divide 16 pairs"):
        list(plan(DPO, parse(DPO, ["--trl-micro-batch", "3"])))
