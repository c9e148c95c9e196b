"""The episodes of a step: several of each prompt, every request with a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlhf_core.config.rl import RLConfig
from rlhf_core.data.chat import Tokenizer
from rlhf_core.environments import Environments
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.errors import EpisodeError
from rlhf_core.rollout.engines import Sampler
from rlhf_core.training.randomness import derived_seed
from rlhf_core.types import Prompt, Trajectory

_SHOWN_FAILURES = 3  # of one round


class RolloutSampler:
    def __init__(
        self,
        config: RLConfig,
        engines: Sampler,
        tokenizer: Tokenizer,
        seed: int,
        environments: Environments | None = None,
    ) -> None:
        """environments: those of `config.environment`; none for single replies."""
        self._config = config
        self._rollouter = Rollouter(engines, tokenizer, config.rollout, environments)
        self._seed = seed
        self._tolerant = environments is not None and environments.tolerated_failures > 0
        self._failures = 0

    def sample(self, prompts: Sequence[Prompt], step: int, sampling_round: int = 0) -> list[Trajectory]:
        """`group_size` trajectories of each prompt, those of one prompt side by side.

        A step that samples several times numbers its rounds. A prompt of which an episode has failed is left out with
        all of its episodes, as where a reward fails; `take_failures` says how many failed. Raises EpisodeError if more
        fail than is tolerated.
        """
        size = self._config.settings.group_size
        starts = [
            Start(
                prompt,
                partial(request_seed, self._seed, step, sampling_round, number * size + of_prompt),
                derived_seed(self._seed, f"environment: step {step}, round {sampling_round}, prompt {number}"),
            )
            for number, prompt in enumerate(prompts)
            for of_prompt in range(size)
        ]
        played = self._rollouter.try_to_play(starts, self._config.sampling)
        errors = {index: each for index, each in enumerate(played) if isinstance(each, EpisodeError)}
        self._failures += len(errors)
        for error in list(errors.values())[:_SHOWN_FAILURES]:
            print(f"tolerated: {error}", flush=True)
        failed = {index // size for index in errors}
        return [
            each
            for index, each in enumerate(played)
            if index // size not in failed and not isinstance(each, EpisodeError)
        ]

    def take_failures(self) -> dict[str, float]:
        """A metric, where failures are tolerated: the episodes that failed since the last call."""
        failures, self._failures = self._failures, 0
        return {"environment/failures": float(failures)} if self._tolerant else {}


def request_seed(seed: int, step: int, sampling_round: int, completion: int, turn: int) -> int:
    """Of one request of the run with `seed`: reply `turn` of the episode `completion` of a round of a step.

    A pure function of these, and of nothing else that is sampled: a resumed run samples what the run would have
    sampled, and no episode depends on how many others are still running.
    """
    return derived_seed(seed, f"rollouts: step {step}, round {sampling_round}, completion {completion}, turn {turn}")
