"""Prompts become trajectories: sampled by the engines as tokens, and never tokenised again."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config.rl import RLConfig
from rlhf_core.data.chat import Tokenizer, stop_token_ids
from rlhf_core.environments import environment_maker
from rlhf_core.rl.episodes import Episode, EpisodeRules
from rlhf_core.rollout.engine import SamplingParameters
from rlhf_core.rollout.engines import Sampler
from rlhf_core.training.randomness import derived_seed
from rlhf_core.types import Prompt, Trajectory


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
        numbers its rounds: every request of a run has a seed of its own.
        Raises StageError if an environment fails.
        """
        repeated = [prompt for prompt in prompts for _ in range(self._config.settings.group_size)]
        stop = stop_token_ids(self._tokenizer)
        episodes = [Episode(prompt, self._make_environment, self._rules) for prompt in repeated]
        for turn in range(self._rules.max_turns):
            live = [index for index, episode in enumerate(episodes) if not episode.over]
            if not live:
                break
            seeds = [request_seed(self._seed, step, sampling_round, index, turn) for index in live]
            parameters = SamplingParameters.of(self._config.sampling, stop, seeds)
            completions = self._engines.generate([episodes[index].token_ids for index in live], parameters)
            for index, completion in zip(live, completions, strict=True):
                episodes[index].take(completion)
        return [episode.trajectory() for episode in episodes]


def request_seed(seed: int, step: int, sampling_round: int, completion: int, turn: int) -> int:
    """Of one request of the run with `seed`: reply `turn` of the episode `completion` of a round of a step.

    A pure function of these, and of nothing else that is sampled: a resumed run samples what the run would have
    sampled, and no episode depends on how many others go on.
    """
    return derived_seed(seed, f"rollouts: step {step}, round {sampling_round}, completion {completion}, turn {turn}")
