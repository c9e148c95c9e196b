"""The episodes of a step: several of each prompt, every request with a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.episodes.rounds import Play
from rlhf_core.errors import EpisodeError
from rlhf_core.rl.filtering import Group
from rlhf_core.training.randomness import derived_seed
from rlhf_core.types import Prompt, Trajectory

_SHOWN_FAILURES = 3  # of one round


class RolloutSampler:
    def __init__(self, config: RLConfig, rollouter: Rollouter, seed: int) -> None:
        self._config, self._rollouter, self._seed = config, rollouter, seed
        self._failures = 0

    def sample(self, prompts: Sequence[Prompt], step: int, sampling_round: int = 0) -> list[Group]:
        """`group_size` trajectories of each prompt.

        A step that samples several times numbers its rounds. A prompt of which an episode has failed is left out with
        all of its episodes, as where a reward fails; `take_failures` says how many failed. Raises EpisodeError if more
        fail than is tolerated.
        """
        size = self._config.settings.group_size
        starts = [
            start for index, prompt in enumerate(prompts) for start in self._starts(prompt, step, index, sampling_round)
        ]
        played = self._rollouter.try_to_play(starts, self._config.sampling)
        self.count([each for each in played if isinstance(each, EpisodeError)])
        groups = [
            [each for each in played[first : first + size] if not isinstance(each, EpisodeError)]
            for first in range(0, len(played), size)
        ]
        return [group for group in groups if len(group) == size]

    def group(self, prompt: Prompt, number: int, attempt: int) -> list[Play[Trajectory | EpisodeError]]:
        """The episodes of one prompt, to be played by the caller; number: of its draw; attempt: counted from 0."""
        step, position = divmod(number, self._config.prompts_per_step)
        return self._rollouter.episodes(self._starts(prompt, step, position, attempt), self._config.sampling)

    def require_tolerable(self, errors: Sequence[EpisodeError], episodes: int) -> None:
        """Of episodes of `group`. Raises EpisodeError if more failed than is tolerated."""
        self._rollouter.require_tolerable(errors, episodes)

    def _starts(self, prompt: Prompt, step: int, position: int, sampling_round: int) -> list[Start]:
        """Of all episodes of the prompt at `position` in a round of a step."""
        size = self._config.settings.group_size
        seed = derived_seed(self._seed, f"environment: step {step}, round {sampling_round}, prompt {position}")
        return [
            Start(prompt, partial(request_seed, self._seed, step, sampling_round, position * size + of_prompt), seed)
            for of_prompt in range(size)
        ]

    def count(self, errors: Sequence[EpisodeError]) -> None:
        """Failures that were tolerated."""
        self._failures += len(errors)
        for error in errors[:_SHOWN_FAILURES]:
            print(f"tolerated: {error}", flush=True)

    def take_failures(self) -> dict[str, float]:
        """A metric, where failures are tolerated: the episodes that failed since the last call."""
        failures, self._failures = self._failures, 0
        return {"environment/failures": float(failures)} if self._rollouter.tolerates_failures else {}


def request_seed(seed: int, step: int, sampling_round: int, completion: int, turn: int) -> int:
    """Of one request of the run with `seed`: reply `turn` of the episode `completion` of a round of a step.

    A pure function of these, and of nothing else that is sampled: a resumed run samples what the run would have
    sampled, and no episode depends on how many others are still running.
    """
    return derived_seed(seed, f"rollouts: step {step}, round {sampling_round}, completion {completion}, turn {turn}")
