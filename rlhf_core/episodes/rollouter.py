"""From prompts to trajectories: the one path of RL, validation, evaluation and the stage `generate`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rlhf_core.chat.encoding import Tokenizer, stop_token_ids
from rlhf_core.config.engines.rollout import RolloutEngineConfig, SamplingConfig
from rlhf_core.environments import Environment, EnvironmentHost, Program, single_turn
from rlhf_core.episodes.concurrent import play_concurrently
from rlhf_core.episodes.episode import Episode, EpisodeRules
from rlhf_core.episodes.programs import play_program
from rlhf_core.episodes.rounds import Ask, Play, play_in_rounds
from rlhf_core.episodes.shown_images import ShownImages
from rlhf_core.episodes.stops import until_stop
from rlhf_core.episodes.stream import Stream
from rlhf_core.errors import EpisodeError
from rlhf_core.rollout.engine import Request, SamplingParameters
from rlhf_core.rollout.engines import Engines, survive_dead_engines
from rlhf_core.types import Prompt, Trajectory


@dataclass(frozen=True, slots=True)
class Start:
    """The start of an episode."""

    prompt: Prompt
    seed: Callable[[int], int]  # of each reply, counted from 0; not called if sampling is greedy
    environment_seed: int = 0


T = TypeVar("T")
_Play = Callable[[Start, SamplingParameters, Ask], Coroutine[Any, Any, T]]


class Rollouter:
    def __init__(
        self,
        engines: Engines,
        tokenizer: Tokenizer,
        config: RolloutEngineConfig,
        environments: EnvironmentHost | None = None,
        stream: Stream | None = None,
        images: ShownImages | None = None,
        replace_dead: Callable[[], list[str]] | None = None,
    ) -> None:
        """config: of the engines. environments: none: an episode is the reply to its prompt. stream: plays all
        episodes, since it occupies the engines; none: engine calls play them. images: reads those of environments;
        none: these use text alone. replace_dead: starts engines that have died again, with the weights of the others;
        none: all serve those that they start with.
        """
        self._images = images
        self._replace_dead = replace_dead or engines.replace_dead
        self._engines = engines
        self._stream = stream
        self._tokenizer = tokenizer
        self._config = config
        self._environments = environments or single_turn()

    @property
    def tolerates_failures(self) -> bool:
        return self._environments.tolerated_failures > 0

    def play(self, starts: Sequence[Start], sampling: SamplingConfig) -> list[Trajectory]:
        """Return the trajectory of each episode, in order. Raises EpisodeError of the first that fails."""
        return self._played(starts, sampling, self._play)

    def try_to_play(self, starts: Sequence[Start], sampling: SamplingConfig) -> list[Trajectory | EpisodeError]:
        """Play as `play` does, but return the errors of failed episodes in their places, up to the tolerated share."""
        if not self.tolerates_failures:
            return [*self.play(starts, sampling)]
        played = self._played(starts, sampling, self._try_to_play)
        self.require_tolerable([each for each in played if isinstance(each, EpisodeError)], len(starts))
        return played

    def episodes(self, starts: Sequence[Start], sampling: SamplingConfig) -> list[Play[Trajectory | EpisodeError]]:
        """Return the episodes, to be played by the caller.

        An error is raised, or returned if failures are tolerated.
        """
        return self._episodes(starts, sampling, self._try_to_play if self.tolerates_failures else self._play)

    def require_tolerable(self, errors: Sequence[EpisodeError], episodes: int) -> None:
        """Raise EpisodeError if more than the tolerated share of the episodes failed."""
        share = self._environments.tolerated_failures
        if len(errors) > share * episodes:
            raise EpisodeError(
                f"{len(errors)} of {episodes} episodes failed, more than the `tolerated_failures` of {share:g} of "
                f"the environment {self._environments.name}; the first: {errors[0]}"
            )

    def _played(self, starts: Sequence[Start], sampling: SamplingConfig, play: _Play[T]) -> list[T]:
        episodes = self._episodes(starts, sampling, play)
        play_all = self._played_by_calls if self._stream is None else self._stream.play
        return survive_dead_engines(
            lambda: play_all(episodes), self._replace_dead, f"{len(episodes)} episodes are played again"
        )

    def _played_by_calls(self, episodes: Sequence[Play[T]]) -> list[T]:
        if not self._config.repeatable:
            return play_concurrently(episodes, self._engines)
        # Episodes of one call wait for each other, and so for no slot.
        at_a_time = self._environments.parallel_episodes or max(1, len(episodes))
        parts = [episodes[start : start + at_a_time] for start in range(0, len(episodes), at_a_time)]
        return [played for part in parts for played in play_in_rounds(part, self._engines)]

    def _episodes(self, starts: Sequence[Start], sampling: SamplingConfig, play: _Play[T]) -> list[Play[T]]:
        parameters = SamplingParameters.of(sampling, stop_token_ids(self._tokenizer))
        return [partial(play, start, parameters) for start in starts]

    async def _play(self, start: Start, parameters: SamplingParameters, ask: Ask) -> Trajectory:
        environments = self._environments.of_row(start.prompt.row)
        rules = EpisodeRules(
            self._tokenizer, environments.max_turns, self._config.max_length, parameters, environments.name,
            environments.episode_seconds, self._images, self._config.skip_special_tokens,
            self._config.structures_replies,
        )  # fmt: skip
        async with environments.slot():
            with closing(environments.new()) as environment:
                return await self._play_in(environment, rules, start, parameters, ask)

    async def _play_in(
        self,
        environment: Environment | Program,
        rules: EpisodeRules,
        start: Start,
        parameters: SamplingParameters,
        ask: Ask,
    ) -> Trajectory:
        if isinstance(environment, Program):
            return await play_program(
                environment, start.prompt, rules, ask,
                seed=start.seed, environment_seed=start.environment_seed,
            )  # fmt: skip
        episode = Episode(start.prompt, environment, rules)
        await episode.begin(start.environment_seed)
        while not episode.over:
            seed = start.seed(episode.turns) if parameters.temperature else None
            reply = await ask(Request(episode.token_ids, episode.sampling, seed, episode.images))
            await episode.take(until_stop(reply, (*parameters.stop, *episode.stop), self._tokenizer))
        return episode.trajectory()

    async def _try_to_play(self, start: Start, parameters: SamplingParameters, ask: Ask) -> Trajectory | EpisodeError:
        try:
            return await self._play(start, parameters, ask)
        except EpisodeError as error:
            return error
