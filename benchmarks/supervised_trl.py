"""TRL's side of `benchmarks.dpo_vs_trl` and `benchmarks.sft_vs_trl`: its DPOTrainer and its SFTTrainer with packing.

`python -m benchmarks.supervised_trl WORKLOAD MODEL RESULT PATH`, where PATH is one of trl_trainers.PATHS. Its
`training_step` is watched.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import Tensor

from benchmarks import trl_trainers
from benchmarks.supervised_workload import COMPLETIONS, LEARNING_RATES, MARKS, SupervisedWorkload, reply, result, rows
from benchmarks.trl_trainers import StepTimer
from benchmarks.word_models import tokenizer
from benchmarks.workload import Result, answer
from rlhf_core.supervised.schedule import shuffled


@dataclass
class StepCounter(StepTimer):
    """A StepTimer that also counts each step's input, and records its loss."""

    steps: list[dict[str, int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def watched(self, training_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap `training_step` of a trainer, which trains one micro-batch and returns its part of the step's loss."""

        def call(model: Any, inputs: Mapping[str, Tensor], *more: Any, **named: Any) -> Tensor:
            if len(self.steps) == len(self.ended):
                self.steps.append({"examples": 0, "tokens": 0, "trained": 0})
                self.losses.append(0.0)
            for name, count in counts(inputs).items():
                self.steps[-1][name] += count
            loss = training_step(model, inputs, *more, **named)
            self.losses[-1] += float(loss)
            return loss

        return call


def counts(inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Count a micro-batch of the trainer: packed sequences without padding, or padded pairs, chosen ones first."""
    if "position_ids" in inputs:
        starts = int((inputs["position_ids"] == 0).sum())
        trained = int((inputs["labels"][:, 1:] != -100).sum())
        return {"examples": starts, "tokens": inputs["position_ids"].numel(), "trained": trained}
    pairs, tokens = len(inputs["input_ids"]) // 2, int(inputs["attention_mask"].sum())
    return {"examples": pairs, "tokens": tokens, "trained": int(inputs["completion_mask"][:, 1:].sum())}


def accumulation(workload: SupervisedWorkload) -> int:
    """Return the forwards and backwards of one step. For packed sequences as many as make an epoch of `all_steps`
    steps.

    Raises ValueError if no number does.
    """
    if workload.method == "dpo":
        return workload.batch // workload.trl_micro_batch
    from trl import pack_dataset

    texts = [(row["prompt"][0]["content"], row["completion"]) for row in rows(workload)]
    ids = [[0] * (sum(len(text.split()) for text in both) + MARKS) for both in texts]
    packed = len(pack_dataset(Dataset.from_dict({"input_ids": ids}), workload.max_length, "bfd"))
    parts = -(-packed // (workload.trl_micro_batch * workload.all_steps))
    if (steps := -(-packed // (workload.trl_micro_batch * parts))) != workload.all_steps:
        raise ValueError(
            f"TRL packs the rows into {packed} sequences, which make {steps} steps and not {workload.all_steps}: "
            "choose another --steps, or a larger --batch"
        )
    return parts


def build(workload: SupervisedWorkload, model: Path, path: str, folder: str, counter: StepCounter) -> Any:
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    shared = {
        "per_device_train_batch_size": workload.trl_micro_batch,
        "gradient_accumulation_steps": accumulation(workload),
        "num_train_epochs": 1,
        "max_length": workload.max_length,
        "learning_rate": LEARNING_RATES[workload.method],
        "adam_beta2": 0.95,  # as ours
        **trl_trainers.arguments(workload, path, folder),
    }
    named = {
        "model": str(model), "processing_class": tokenizer(workload.shape.vocabulary), "callbacks": [counter]
    }  # fmt: skip
    names = COMPLETIONS[workload.method]
    conversations = [
        {"prompt": row["prompt"], **{name: [reply(row[name])] for name in names}} for row in rows(workload)
    ]
    if workload.method == "sft":
        return SFTTrainer(
            args=SFTConfig(packing=True, **shared), train_dataset=Dataset.from_list(conversations), **named
        )
    order = shuffled(len(conversations), seed=0, name="epoch 0")  # ours, so that each step trains the same pairs
    arguments = DPOConfig(beta=0.1, train_sampling_strategy="sequential", **shared)
    return DPOTrainer(
        args=arguments, train_dataset=Dataset.from_list([conversations[index] for index in order]), **named
    )


def run(workload: SupervisedWorkload, model: Path, path: str) -> Result:
    counter = StepCounter()
    with tempfile.TemporaryDirectory(prefix=f"{workload.method}-") as folder:
        trainer = build(workload, model, path, folder, counter)
        trainer.training_step = counter.watched(trainer.training_step)
        trainer.train()
    ended = list(zip(counter.ended, counter.losses, strict=True))
    return result(workload, ended, counter.steps, trl_trainers.versions())


if __name__ == "__main__":
    answer(sys.argv[1:], SupervisedWorkload, run)
