"""The synthetic work of both sides of `benchmarks.grpo_vs_trl`: prompts and reward.

By default every completion has the same number of tokens, so both sides train on exactly as many: the model is made so
that it never samples the token that would end one, and no side has to forbid it. All prompts are equally long, without
padding. `--mean-completion` makes the work ragged: the model ends a completion after that many tokens on average, a
geometric distribution, and prompts have any length up to `--longest-prompt`. Then the sides train on other completions
of the same distribution, and each counts its own tokens. Importing this loads no torch: the reward function's own
process reads this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.word_models import CONTEXT, word_ids
from benchmarks.workload import Workload
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig

PROMPTS = 256  # in the dataset
LEARNING_RATE = 1e-9  # of both sides: a single step of 1e-6 can double the length of completions


@dataclass(frozen=True, slots=True)
class GRPOWorkload(Workload):
    prompts: int = 8  # of one step
    group: int = 8  # completions of one prompt
    prompt_tokens: int = 32  # of the shortest
    longest_prompt: int = 0  # tokens; 0: all prompts are equally long
    completion_tokens: int = 64  # at most, and where completions do not end exactly
    mean_completion: int = 0  # tokens, if completions could be longer than `completion_tokens`; 0: they never end
    trl_micro_batch: int = 64  # completions of one forward and backward of TRL's
    # Of ours: tokens of one forward and backward, the default of the stage.
    tokens_per_micro_batch: int = EngineConfig().micro_batch_tokens(Placement())

    @property
    def completions(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        """Trained tokens of one step, if completions never end."""
        return self.completions * self.completion_tokens

    @property
    def longest(self) -> int:
        """Length limit of a prompt, in tokens."""
        return max(self.prompt_tokens, self.longest_prompt)

    @property
    def length(self) -> int:
        """Length limit of a sequence, in tokens."""
        return self.longest + self.completion_tokens

    @property
    def accumulation(self) -> int:
        """Forwards and backwards of one of TRL's steps."""
        return self.completions // self.trl_micro_batch

    def check(self) -> None:
        Workload.check(self)
        if self.completions % self.trl_micro_batch:
            raise ValueError(f"trl_micro_batch {self.trl_micro_batch} does not divide {self.completions} completions")
        if self.prompt_tokens <= 3 or self.length > CONTEXT:
            raise ValueError(f"prompts have more than 3 tokens, and {CONTEXT} at most with their completion")
        if 0 < self.longest_prompt < self.prompt_tokens:
            raise ValueError(f"longest_prompt {self.longest_prompt} is below prompt_tokens {self.prompt_tokens}")


def rows(workload: GRPOWorkload) -> list[dict[str, Any]]:
    """Return the dataset: rows of format `prompts`, one user turn each."""
    random = Random(0)
    words = word_ids(workload.shape.vocabulary)
    lengths = [random.randint(workload.prompt_tokens, workload.longest) - 3 for _ in range(PROMPTS)]
    questions = [" ".join(f"w{random.choice(words)}" for _ in range(length)) for length in lengths]
    return [{"id": str(i), "prompt": [{"role": "user", "content": text}]} for i, text in enumerate(questions)]


def prompt_ids(workload: GRPOWorkload) -> set[tuple[int, ...]]:
    """Return the prompts in tokens, to verify those of each side: <bos> <user> ... <assistant>."""
    contents = [row["prompt"][0]["content"].split() for row in rows(workload)]
    return {(1, 2, *(int(word[1:]) for word in words), 3) for words in contents}


def reward(completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Any]) -> list[float]:
    """Return a cheap reward, different for the completions of one prompt, so that every token has a gradient."""
    return [sum(map(ord, completion)) % 97 / 97 for completion in completions]
