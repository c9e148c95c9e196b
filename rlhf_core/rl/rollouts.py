"""Prompts become trajectories: sampled by the engines as tokens, and never tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rlhf_core.config.rl import RLConfig
from rlhf_core.data.chat import Tokenizer, decode_completion, stop_token_ids
from rlhf_core.rollout.engine import SamplingParameters
from rlhf_core.types import Completion, Prompt, Trajectory


class Engines(Protocol):
    """What the loop needs of the engines, one or many."""

    def generate(self, prompts: Sequence[Sequence[int]], parameters: SamplingParameters) -> list[Completion]: ...


class RolloutSampler:
    def __init__(self, config: RLConfig, engines: Engines, tokenizer: Tokenizer, seed: int) -> None:
        self._config = config
        self._engines = engines
        self._tokenizer = tokenizer
        self._seed = seed

    def sample(self, prompts: Sequence[Prompt], step: int) -> list[Trajectory]:
        """`group_size` trajectories of each prompt, those of one prompt side by side."""
        repeated = [prompt for prompt in prompts for _ in range(self._config.settings.group_size)]
        sampling = self._config.sampling
        parameters = SamplingParameters(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=stop_token_ids(self._tokenizer),
            # Request i is sampled with seed + i: steps and runs must not share any.
            seed=(self._seed * 100_003 + step) * len(repeated),
        )
        completions = self._engines.generate([prompt.token_ids for prompt in repeated], parameters)
        return [self._trajectory(prompt, c) for prompt, c in zip(repeated, completions, strict=True)]

    def _trajectory(self, prompt: Prompt, completion: Completion) -> Trajectory:
        token_ids = torch.tensor([*prompt.token_ids, *completion.token_ids], dtype=torch.int64)
        start = len(prompt.token_ids)
        loss_mask = torch.zeros(token_ids.numel(), dtype=torch.bool)
        loss_mask[start:] = True
        logprobs = torch.zeros(token_ids.numel())
        logprobs[start:] = torch.tensor(completion.logprobs)
        return Trajectory(
            prompt=prompt,
            token_ids=token_ids,
            loss_mask=loss_mask,
            rollout_logprobs=logprobs,
            weight_version=completion.weight_version,
            finish_reason=completion.finish_reason,
            completion=decode_completion(self._tokenizer, completion.token_ids),
        )
