"""TRL's side of `benchmarks.grpo_vs_trl`: its GRPOTrainer, set up for speed on a CPU as by a user.

`python -m benchmarks.grpo_trl WORKLOAD MODEL RESULT PATH`, where PATH is one of trl_trainers.PATHS. Three of its
methods are timed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from benchmarks import trl_trainers
from benchmarks.grpo_workload import LEARNING_RATE, GRPOWorkload, prompt_ids, reward, rows
from benchmarks.trl_trainers import StepTimer
from benchmarks.word_models import tokenizer
from benchmarks.workload import Result, answer, measured

# Of TRL's ways to sample, its vLLM needs a GPU. Its continuous batching is left out: at 1m it took tens of times as
# long, and at 25m it ended a completion early.


@dataclass
class PhaseTimer(StepTimer):
    """A StepTimer that also measures each step by phase."""

    phases: list[dict[str, float]] = field(default_factory=list)
    _began: float = 0.0
    _current: dict[str, float] = field(default_factory=dict)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        super().on_step_end(*arguments, **named)
        seconds, self._current = self._current, {}
        generate, score, prepare = (seconds.get(name, 0.0) for name in ("generate", "score", "prepare"))
        update = self.ended[-1] - self._began - prepare
        self.phases.append({"generate": generate, "score": score, "update": update, "publish": 0.0})

    def timed(self, phase: str, method: Callable[..., Any], where: Callable[[], bool] = lambda: True) -> Any:
        """Wrap `method`; its seconds are added to `phase` if `where()` is true."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            answer = method(*arguments, **named)
            if where():
                self._current[phase] = self._current.get(phase, 0.0) + time.perf_counter() - began
            return answer

        return call


def text_reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """Return the workload's reward of TRL's conversations."""
    return reward([completion[0]["content"] for completion in completions], [], [])


def build(workload: GRPOWorkload, model: Path, path: str, folder: str, timer: PhaseTimer) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        per_device_train_batch_size=workload.trl_micro_batch,
        gradient_accumulation_steps=workload.accumulation,
        num_generations=workload.group,
        max_completion_length=workload.completion_tokens,
        max_steps=workload.all_steps,
        temperature=1.0,
        beta=0.0,  # no reference model
        num_iterations=1,
        learning_rate=LEARNING_RATE,
        **trl_trainers.arguments(workload, path, folder),
    )
    return GRPOTrainer(
        model=str(model), reward_funcs=text_reward, args=arguments, train_dataset=Dataset.from_list(rows(workload)),
        processing_class=tokenizer(workload.shape.vocabulary), callbacks=[timer],
    )  # fmt: skip


def checked(workload: GRPOWorkload, generate: Callable[..., Any], tokens: list[int]) -> Any:
    """Wrap `generate`, and check that it gets the workload's prompts and returns full completions, or ending ones if
    allowed.

    tokens: receives the number of theirs, step by step.
    """
    allowed = prompt_ids(workload)

    def call(prompts: Sequence[Iterable[int]], *arguments: Any, **named: Any) -> Any:
        completions, logprobs = generate(prompts, *arguments, **named)
        if len(prompts) != workload.completions or not {tuple(ids) for ids in prompts} <= allowed:
            raise RuntimeError("the prompts are not those of the workload")
        tokens.append(sum(map(len, completions)))
        if not workload.mean_completion and any(len(ids) != workload.completion_tokens for ids in completions):
            raise RuntimeError("a completion ended early: not the same work")
        return completions, logprobs

    return call


def run(workload: GRPOWorkload, model: Path, path: str) -> Result:
    timer, tokens = PhaseTimer(), list[int]()
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
        trainer = build(workload, model, path, folder, timer)
        generate = timer.timed("generate", trainer._generate_single_turn)
        trainer._generate_single_turn = checked(workload, generate, tokens)
        trainer._prepare_inputs = timer.timed("prepare", trainer._prepare_inputs)
        trainer._get_per_token_logps_and_entropies = timer.timed(
            "score", trainer._get_per_token_logps_and_entropies, lambda: not torch.is_grad_enabled()
        )
        trainer.train()
    return measured(workload, timer.ended, tokens, trl_trainers.versions(), phases=timer.phases)


if __name__ == "__main__":
    answer(sys.argv[1:], GRPOWorkload, run)
