"""Prompts become trajectories: sampled by the engines as tokens, and never tokenised again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from rlhf_core.config.rl import RLConfig
from rlhf_core.data.chat import Tokenizer, decode_completion, stop_token_ids
from rlhf_core.rollout.engine import SamplingParameters
from rlhf_core.rollout.engines import Sampler
from rlhf_core.types import Completion, Prompt, Trajectory

# Seeds of requests below 2^62, in blocks: one for each round of each step.
_BLOCKS = 2**42
_ROUNDS = 2**8
_REQUESTS = 2**20


class RolloutSampler:
    def __init__(self, config: RLConfig, engines: Sampler, tokenizer: Tokenizer, seed: int) -> None:
        self._config = config
        self._engines = engines
        self._tokenizer = tokenizer
        self._seed = seed

    def sample(self, prompts: Sequence[Prompt], step: int, sampling_round: int = 0) -> list[Trajectory]:
        """`group_size` trajectories of each prompt, those of one prompt side by side.

        A step that samples several times numbers its rounds: no two requests of a run have the same seed.
        """
        repeated = [prompt for prompt in prompts for _ in range(self._config.settings.group_size)]
        if len(repeated) > _REQUESTS:
            raise ValueError(f"{len(repeated)} completions of one round; there are seeds for {_REQUESTS}")
        seed = first_seed(self._seed, step, sampling_round)
        parameters = SamplingParameters.of(self._config.sampling, stop_token_ids(self._tokenizer), seed)
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


def first_seed(seed: int, step: int, sampling_round: int) -> int:
    """The seed of the first request of a round; request i is sampled with this + i.

    A pure function, so that a resumed run samples what the run would have sampled. Within a run no two requests of up
    to 2^20 a round, 2^8 rounds a step, share a seed; where the seeds of a run begin is a hash of the run's own seed.
    """
    if not 0 <= sampling_round < _ROUNDS:
        raise ValueError(f"round {sampling_round} of a step; there are seeds for {_ROUNDS}")
    start = int.from_bytes(hashlib.sha256(f"rollouts {seed}".encode()).digest()[:8], "big")
    return (start + step * _ROUNDS + sampling_round) % _BLOCKS * _REQUESTS
