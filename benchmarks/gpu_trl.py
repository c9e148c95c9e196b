"""TRL's side of `benchmarks.gpu`: the update of its GRPOTrainer on given completions.

TRL is unchanged except for the source of completions: they are drawn, not sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.word_models import tokenizer, word_ids

_MARKS = 3  # tokens that the template adds to a prompt's words
_MICRO_BATCH = 8  # sequences of a forward


@dataclass
class UpdateTimer(TrainerCallback):
    """Measures each step without its `prepare`, on a synchronised device."""

    synchronize: Callable[[], None]
    seconds: list[float] = field(default_factory=list)
    _began: float = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.synchronize()
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.synchronize()
        self.seconds.append(time.perf_counter() - self._began)

    def without(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.synchronize()
            began = time.perf_counter()
            inputs = prepare(*arguments, **named)
            self.synchronize()
            self._began += time.perf_counter() - began
            return inputs

        return call


def update_seconds(
    model: Any, *, prompts: int, prompt: int, completions: int, completion: int, steps: int,
    synchronize: Callable[[], None],
) -> list[float]:  # fmt: skip
    """Return the seconds of each of `steps` updates on `prompts` x `completions` sequences of these lengths in tokens.

    model: a PreTrainedModel on its device; float32 weights are trained under bfloat16 autocast, TRL's default.
    """
    from trl import GRPOConfig, GRPOTrainer

    vocabulary = model.config.vocab_size
    words = word_ids(vocabulary)
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(words.start, words.stop, (count,), generator=generator).tolist()

    def drawn(prompt_tokens: Sequence[Sequence[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        if any(len(ids) != prompt for ids in prompt_tokens):
            raise RuntimeError(f"a prompt has not {prompt} tokens")
        return [draw(completion) for _ in prompt_tokens], None

    texts = [" ".join(f"w{word}" for word in draw(prompt - _MARKS)) for _ in range(prompts * steps)]
    timer = UpdateTimer(synchronize)
    micro_batch = min(_MICRO_BATCH, prompts * completions)
    with TemporaryDirectory(prefix="grpo-") as folder:
        trainer = GRPOTrainer(
            model=model, processing_class=tokenizer(vocabulary), callbacks=[timer],
            reward_funcs=lambda completions, **_: torch.randn(len(completions), generator=generator).tolist(),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts]),
            args=GRPOConfig(
                output_dir=folder, per_device_train_batch_size=micro_batch, num_generations=completions,
                gradient_accumulation_steps=prompts * completions // micro_batch, max_completion_length=completion,
                max_steps=steps, beta=0.0, num_iterations=1, learning_rate=1e-6, lr_scheduler_type="constant",
                bf16=model.dtype == torch.float32, use_cpu=model.device.type == "cpu", gradient_checkpointing=False,
                logging_strategy="no", report_to="none", save_strategy="no", disable_tqdm=True, seed=0,
            ),
        )  # fmt: skip
        trainer._generate_single_turn = drawn
        trainer._prepare_inputs = timer.without(trainer._prepare_inputs)
        trainer.train()
    return timer.seconds
