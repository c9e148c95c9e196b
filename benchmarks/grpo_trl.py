"""TRL's side of `benchmarks.grpo_vs_trl`: its GRPOTrainer, as a user would set it up for speed on a CPU.

`python -m benchmarks.grpo_trl WORKLOAD MODEL RESULT PATH`, where PATH is one of PATHS. Nothing of TRL is changed; three
of its methods are timed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.grpo_workload import Workload, prompt_ids, reward, rows, tokenizer, write_result

# What differs from one path to another, for float32 and for bfloat16; `dtype` is that of the weights it trains.
# Its vLLM needs a GPU. Its continuous batching is left out: at 1m it took tens of times as long, and at 25m it ended
# a completion early.
PATHS: dict[str, dict[str, dict[str, Any]]] = {
    "trl": {  # bfloat16 by autocast over float32 weights, which is TRL's own default
        "float32": {"dtype": "float32", "bf16": False},
        "bfloat16": {"dtype": "float32", "bf16": True},
    },
    "trl-bf16-weights": {  # and a bfloat16 optimizer: less work and less exact than a float32 master copy
        "bfloat16": {"dtype": "bfloat16", "bf16": False},
    },
}


@dataclass
class StepTimer(TrainerCallback):
    """Seconds of each step by phase; a step lasts from the end of the one before to its own."""

    steps: list[dict[str, float]] = field(default_factory=list)
    ended: float = 0.0  # the last step
    _began: float = 0.0
    _phases: dict[str, float] = field(default_factory=dict)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ended = time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        now = time.perf_counter()
        phases, self._phases = self._phases, {}
        generate, score, prepare = (phases.get(name, 0.0) for name in ("generate", "score", "prepare"))
        self.steps.append({
            "seconds": now - self.ended, "generate": generate, "score": score,
            "update": now - self._began - prepare, "publish": 0.0,
        })  # fmt: skip
        self.ended = now

    def timed(self, phase: str, method: Callable[..., Any], where: Callable[[], bool] = lambda: True) -> Any:
        """`method`, its seconds added to `phase` where `where()` is true."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            answer = method(*arguments, **named)
            if where():
                self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - began
            return answer

        return call


def text_reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """The workload's reward, on conversations as TRL hands them over."""
    return reward([completion[0]["content"] for completion in completions], [], [])


def build(workload: Workload, model: Path, path: str, folder: str, timer: StepTimer) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    options = dict(PATHS[path][workload.dtype])
    arguments = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": options.pop("dtype"), "attn_implementation": "sdpa"},
        per_device_train_batch_size=workload.micro_batch,
        gradient_accumulation_steps=workload.accumulation,
        num_generations=workload.group,
        max_completion_length=workload.completion_tokens,
        max_steps=workload.warm_up + workload.steps,
        temperature=1.0,
        beta=0.0,  # no reference model
        num_iterations=1,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=0,
        **options,
    )
    return GRPOTrainer(
        model=str(model), reward_funcs=text_reward, args=arguments, train_dataset=Dataset.from_list(rows(workload)),
        processing_class=tokenizer(workload.shape.vocabulary), callbacks=[timer],
    )  # fmt: skip


def checked(workload: Workload, generate: Callable[..., Any]) -> Any:
    """`generate`, which must have been given the workload's prompts and answer with full completions."""
    known = prompt_ids(workload)

    def call(prompts: Sequence[Iterable[int]], *arguments: Any, **named: Any) -> Any:
        completions, logprobs = generate(prompts, *arguments, **named)
        if len(prompts) != workload.completions or not {tuple(ids) for ids in prompts} <= known:
            raise RuntimeError("the prompts are not those of the workload")
        if any(len(ids) != workload.completion_tokens for ids in completions):
            raise RuntimeError("a completion ended early: not the same work")
        return completions, logprobs

    return call


def run(workload: Workload, model: Path, path: str) -> tuple[float, list[dict[str, float]]]:
    """When the counted steps began, and the steps."""
    timer = StepTimer()
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
        trainer = build(workload, model, path, folder, timer)
        trainer._generate_single_turn = checked(workload, timer.timed("generate", trainer._generate_single_turn))
        trainer._prepare_inputs = timer.timed("prepare", trainer._prepare_inputs)
        trainer._get_per_token_logps_and_entropies = timer.timed(
            "score", trainer._get_per_token_logps_and_entropies, lambda: not torch.is_grad_enabled()
        )
        trainer.train()
    counted = timer.steps[workload.warm_up :]
    return timer.ended - sum(step["seconds"] for step in counted), counted


def main(arguments: Sequence[str]) -> int:
    workload, model, result, path = arguments
    began, steps = run(Workload.read(Path(workload)), Path(model), path)
    write_result(Path(result), began, steps, {name: version(name) for name in ("torch", "transformers", "trl")})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
