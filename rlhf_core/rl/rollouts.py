"""Prompts become trajectories: sampled by the engines as tokens, and never tokenised again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rlhf_core.config.rl import RLConfig
from rlhf_core.data.chat import Tokenizer, stop_token_ids
from rlhf_core.environments import environment_maker
from rlhf_core.rl.episodes import Episode, EpisodeRules
from rlhf_core.rollout.engine import SamplingParameters
from rlhf_core.rollout.engines import Sampler
from rlhf_core.types import Prompt, Trajectory

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
        self._make_environment = environment_maker(config.environment)
        self._rules = EpisodeRules.of(config, tokenizer)

    def sample(self, prompts: Sequence[Prompt], step: int, sampling_round: int = 0) -> list[Trajectory]:
        """`group_size` trajectories of each prompt, those of one prompt side by side.

        Episodes advance turn by turn; all that continue are one call of the engines. A step that samples several times
        numbers its rounds: no two requests of a run have the same seed.
        Raises StageError if an environment fails.
        """
        repeated = [prompt for prompt in prompts for _ in range(self._config.settings.group_size)]
        if len(repeated) * self._rules.max_turns > _REQUESTS:
            raise ValueError(
                f"{len(repeated)} completions of one round, in up to {self._rules.max_turns} turns; there are seeds "
                f"for {_REQUESTS}"
            )
        seed = first_seed(self._seed, step, sampling_round)
        stop = stop_token_ids(self._tokenizer)
        episodes = [Episode(prompt, self._make_environment, self._rules) for prompt in repeated]
        for turn in range(self._rules.max_turns):
            live = [episode for episode in episodes if not episode.over]
            if not live:
                break
            parameters = SamplingParameters.of(self._config.sampling, stop, seed + turn * len(repeated))
            completions = self._engines.generate([episode.token_ids for episode in live], parameters)
            for episode, completion in zip(live, completions, strict=True):
                episode.take(completion)
        return [episode.trajectory() for episode in episodes]


def first_seed(seed: int, step: int, sampling_round: int) -> int:
    """The seed of the first request of a round; request i is sampled with this + i, and request i of those that
    continue into turn t, counted from 0, with this + t times the requests of the round + i.

    A pure function, so that a resumed run samples what the run would have sampled. Within a run no two requests of up
    to 2^20 a round over all turns, 2^8 rounds a step, share a seed; where the seeds of a run begin is a hash of the
    run's own seed.
    """
    if not 0 <= sampling_round < _ROUNDS:
        raise ValueError(f"round {sampling_round} of a step; there are seeds for {_ROUNDS}")
    start = int.from_bytes(hashlib.sha256(f"rollouts {seed}".encode()).digest()[:8], "big")
    return (start + step * _ROUNDS + sampling_round) % _BLOCKS * _REQUESTS
