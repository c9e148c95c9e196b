"""The synthetic work of both sides of `benchmarks.dpo_vs_trl` and `benchmarks.sft_vs_trl`: rows.

Lengths vary as in real data: those of prompts and of completions are log-normal. No row is cut by either side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from benchmarks.word_models import CONTEXT, word_ids
from benchmarks.workload import Result, Workload, measured
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig

SPREAD = 0.6  # standard deviation of the logarithm of a length
COMPLETIONS = {"dpo": ("chosen", "rejected"), "sft": ("completion",)}
MARKS = 4  # tokens of a sequence that are no words: <bos>, <user>, <assistant> and <eos>
LEARNING_RATES = {
    "dpo": 1e-5,  # both sides train the same pairs in the same order: their losses must fall alike
    "sft": 1e-7,  # TRL orders rows as it packs them: the mean loss of an epoch must not depend on their order
}


@dataclass(frozen=True, slots=True)
class SupervisedWorkload(Workload):
    """One epoch: each side trains every row once."""

    method: Literal["dpo", "sft"] = field(kw_only=True)
    batch: int = 16  # rows of one step: pairs, or conversations
    prompt_tokens: int = 64  # median
    completion_tokens: int = 128  # median
    max_length: int = 1024  # of a sequence; TRL packs conversations into sequences of this length
    trl_micro_batch: int = 1  # of TRL: pairs, or packed sequences of one forward and backward
    # Of ours: tokens of one forward and backward, the default of the stages.
    tokens_per_micro_batch: int = EngineConfig().micro_batch_tokens(Placement())

    @property
    def num_rows(self) -> int:
        return self.batch * self.all_steps

    def check(self) -> None:
        Workload.check(self)
        if self.method == "dpo" and self.batch % self.trl_micro_batch:
            raise ValueError(f"trl_micro_batch {self.trl_micro_batch} does not divide {self.batch} pairs")
        if not 16 <= self.max_length <= CONTEXT:
            raise ValueError(f"max_length is {self.max_length}, but the models read 16 to {CONTEXT} tokens")


def rows(workload: SupervisedWorkload) -> list[dict[str, Any]]:
    """Return rows with an id, a prompt of one turn, and the text of one completion, or of two, chosen and rejected."""
    random = Random(0)
    words = word_ids(workload.shape.vocabulary)

    def text(median: int, most: int) -> str:
        length = min(most, max(1, round(random.lognormvariate(math.log(median), SPREAD))))
        return " ".join(f"w{random.choice(words)}" for _ in range(length))

    all_rows = []
    for index in range(workload.num_rows):
        prompt = text(workload.prompt_tokens, workload.max_length // 2)
        room = workload.max_length - len(prompt.split()) - MARKS
        completions = {name: text(workload.completion_tokens, room) for name in COMPLETIONS[workload.method]}
        all_rows.append({"id": str(index), "prompt": [{"role": "user", "content": prompt}], **completions})
    return all_rows


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def result(
    workload: SupervisedWorkload,
    ended: Sequence[tuple[float, float]],
    counts: Sequence[Mapping[str, int]],
    versions: dict[str, str],
) -> Result:
    """Return the result of either side. ended: end and loss of each step; counts: its examples, tokens, and trained
    tokens.

    The losses to compare are those of the steps, or, if the sides order rows in different ways, their mean.
    """
    losses = [loss for _, loss in ended]
    consumed = {name: sum(step[name] for step in counts) for name in counts[0]}
    if workload.method == "sft":
        trained = zip(losses, (step["trained"] for step in counts), strict=True)
        losses = [sum(loss * tokens for loss, tokens in trained) / consumed["trained"]]
    amounts = [step["tokens" if workload.method == "sft" else "examples"] for step in counts]
    times = [time for time, _ in ended]
    return measured(workload, times, amounts, versions, consumed=consumed, losses=losses)
