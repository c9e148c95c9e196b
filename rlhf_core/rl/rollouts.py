"""The episodes of a step: several per prompt, each request with its own seed."""

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

_SHOWN_FAILURES = 3  # per round


class RolloutSampler:
    def __init__(self, config: RLConfig, rollouter: Rollouter, seed: int) -> None:
        self._config, self._rollouter, self._seed = config, rollouter, seed
        self._failures = 0

    def sample(self, prompts: Sequence[Prompt], step: int, sampling_round: int = 0) -> list[Group]:
        """Sample `group_size` trajectories of each prompt.

        sampling_round: numbers repeated sampling in one step. A prompt with a failed episode is dropped with all of its
        episodes, as with a failed reward; `take_failures` counts the failed episodes. Raises EpisodeError if more fail
        than are tolerated.
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
        """Return the episodes of one prompt, for the caller to play. number: of its draw; attempt: counted from 0."""
        step, position = divmod(number, self._config.prompts_per_step)
        return self._rollouter.episodes(self._starts(prompt, step, position, attempt), self._config.sampling)

    def require_tolerable(self, errors: Sequence[EpisodeError], episodes: int) -> None:
        """Raise EpisodeError if more of `episodes` episodes of `group` failed than are tolerated."""
        self._rollouter.require_tolerable(errors, episodes)

    def _starts(self, prompt: Prompt, step: int, position: int, sampling_round: int) -> list[Start]:
        """Return the starts of all episodes of the prompt at `position` in a round of a step."""
        size = self._config.settings.group_size
        seed = derived_seed(self._seed, f"environment: step {step}, round {sampling_round}, prompt {position}")
        return [
            Start(prompt, partial(request_seed, self._seed, step, sampling_round, position * size + of_prompt), seed)
            for of_prompt in range(size)
        ]

    def count(self, errors: Sequence[EpisodeError]) -> None:
        """Count and print tolerated failures."""
        self._failures += len(errors)
        for error in errors[:_SHOWN_FAILURES]:
            print(f"tolerated: {error}", flush=True)

    def take_failures(self) -> dict[str, float]:
        """Return the number of failed episodes since the last call as a metric, if failures are tolerated."""
        failures, self._failures = self._failures, 0
        return {"environment/failures": float(failures)} if self._rollouter.tolerates_failures else {}


def request_seed(seed: int, step: int, sampling_round: int, completion: int, turn: int) -> int:
    """Return the seed of one request: reply `turn` of episode `completion` in a round of a step of the run with `seed`.

    A pure function of its arguments: a resumed run samples the same as an uninterrupted one, and no episode depends on
    how many others are still running.
    """
    return derived_seed(seed, f"rollouts: step {step}, round {sampling_round}, completion {completion}, turn {turn}")
