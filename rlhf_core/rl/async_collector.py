"""What a step trains on, sampled and judged while earlier steps train.

Completions of at most `in_flight` prompts are sampled, judged or wait. A step takes those of `prompts_per_step` prompts
that are done first, and others begin in their place, with whatever weights the engines have by then.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.episodes.stream import Stream
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.rewards import TrajectoryReward
from rlhf_core.rl.filtering import Group, Tally
from rlhf_core.rl.hybrid import OwnDevices
from rlhf_core.rl.phases import PhaseTimer
from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.rl.rewarding import RewardPipeline, monitor
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.rl.stored import stored, trajectory_of
from rlhf_core.types import Trajectory


@dataclass(frozen=True, slots=True)
class Answered:
    """The completions of one prompt."""

    number: int  # of the prompt's draw
    attempt: int  # how often it was answered before
    group: Group

    @property
    def oldest(self) -> int:
        """The version of the weights that sampled its oldest token."""
        return min(trajectory.weight_version for trajectory in self.group)


class AsyncCollector:
    """Implements Collector. Its state belongs to the stream's event loop. A checkpoint has every prompt that was drawn
    and not trained on: with its completions if they were judged already, else it is answered again."""

    def __init__(
        self,
        config: RLConfig,
        prompts: PromptSampler,
        rollouts: RolloutSampler,
        rewards: RewardPipeline,
        monitors: Mapping[str, TrajectoryReward],
        stream: Stream,
    ) -> None:
        self._config, self._prompts, self._rollouts = config, prompts, rollouts
        self._rewards, self._monitors, self._stream = rewards, monitors, stream
        self._begun: set[int] = set()  # draws that are sampled or judged
        self._sampled: list[Answered] = []  # to be judged
        self._ready: deque[Answered] = deque()
        self._judging = asyncio.Lock()
        self._to_judge, self._changed = asyncio.Event(), asyncio.Event()
        self._since = _SinceLastStep()
        self._steps_ahead = 0  # for which prompts may be under way or wait
        self._started = False

    def collect(self, step: int, phase: PhaseTimer) -> tuple[list[Trajectory], dict[str, float]]:
        """See Collector. No trajectory is older than `max_lag` updates; the phase `rollout` is the time spent waiting.

        Raises what an engine, an episode or a reward raised, and StageError where filtering leaves too few prompts.
        """
        with phase("rollout"):
            taken, metrics = self._stream.call(self._take(step))
        trajectories = [trajectory for answered in taken for trajectory in answered.group]
        with phase("reward"):
            metrics |= monitor(trajectories, self._monitors)
        return trajectories, metrics

    async def _take(self, step: int) -> tuple[list[Answered], dict[str, float]]:
        wanted = self._config.prompts_per_step
        # What begins now has the newest weights, and what begins once these are trained on is one more update behind
        # when its turn comes: the bound of arXiv:2505.24298, section 5.1.
        self._steps_ahead = self._config.max_lag + 1
        if not self._started:
            self._start()
        self._fill()
        while not self._is_enough(step):
            self._changed.clear()
            await self._stream.unless_it_fails(self._changed.wait())
        taken = [self._ready.popleft() for _ in range(min(wanted, len(self._ready)))]
        metrics = {
            **_lag_metrics(taken, step),
            "asynchronous/waiting": float(len(self._ready)),
            **self._since.metrics(),
        }
        self._rollouts.count(self._since.errors)
        metrics |= self._rollouts.take_failures()
        if self._config.settings.filtering is not None:
            self._since.tally.rounds = math.ceil(len(self._since.tally.scores) / wanted)  # as many would have been
            metrics |= self._since.tally.metrics(surplus=0)
        self._since = _SinceLastStep()
        self._steps_ahead -= 1
        self._fill()
        return taken, metrics

    def _is_enough(self, step: int) -> bool:
        """Whether the step can begin. Raises EpisodeError if more episodes failed than is tolerated."""
        wanted, filtering, since = self._config.prompts_per_step, self._config.settings.filtering, self._since
        least = wanted * self._config.settings.group_size
        self._rollouts.require_tolerable(since.errors, max(since.episodes, least))
        self._sort_out_old(step)
        if len(self._ready) >= wanted:
            return True
        if filtering is None or len(since.tally.scores) < filtering.max_rounds * wanted:
            return False
        if not self._ready or filtering.when_short == "stop":
            since.tally.rounds = filtering.max_rounds
            raise StageError(f"step {step}: {since.tally.complaint(len(self._ready), wanted)}")
        return True

    def _sort_out_old(self, step: int) -> None:
        settings = self._config.asynchronous
        assert settings is not None
        fresh = [answered for answered in self._ready if step - answered.oldest <= settings.max_lag]
        old = [answered for answered in self._ready if step - answered.oldest > settings.max_lag]
        self._ready = deque(fresh)
        self._since.too_old += len(old)
        for answered in old if settings.too_old == "resample" else ():
            self._begin(answered.number, answered.attempt + 1)
        self._fill()

    def _start(self) -> None:
        self._started = True
        self._stream.begin(self._judge())
        for number in sorted(self._begun):  # of a checkpoint
            self._begin(number, 0)

    def _fill(self) -> None:
        most = min(self._config.in_flight, self._steps_ahead * self._config.prompts_per_step)
        while len(self._begun) + len(self._ready) < most:
            self._begin(self._prompts.next(), 0)

    def _begin(self, number: int, attempt: int) -> None:
        self._begun.add(number)
        self._stream.begin(self._answer(number, attempt))

    async def _answer(self, number: int, attempt: int) -> None:
        ask = self._stream.asker()  # one for all, which compute the prompt once
        episodes = self._rollouts.group(self._prompts.at(number), number, attempt)
        played = await asyncio.gather(*(play(ask) for play in episodes))
        errors = [each for each in played if isinstance(each, EpisodeError)]
        self._since.episodes += len(played)
        self._since.errors += errors
        if errors:
            self._leave_out(number)
        else:
            group = [each for each in played if not isinstance(each, EpisodeError)]
            self._sampled.append(Answered(number, attempt, group))
            self._to_judge.set()

    def _leave_out(self, number: int) -> None:
        self._begun.discard(number)
        self._changed.set()
        self._fill()

    async def _judge(self) -> None:
        """All that has been sampled by now, together, in a thread: a slow reward holds up neither engines nor ranks."""
        with ThreadPoolExecutor(1) as thread:
            while await self._to_judge.wait():
                async with self._judging:
                    self._to_judge.clear()
                    batch, self._sampled = self._sampled, []
                    loop = asyncio.get_running_loop()
                    judged = await loop.run_in_executor(thread, self._rewards, [each.group for each in batch])
                    failures = self._rewards.take_failures()
                    self._since.add_failures(failures)
                    self._sift(batch, judged)

    def _sift(self, batch: Sequence[Answered], judged: Sequence[Group | None]) -> None:
        """judged: the groups of the batch with their rewards; None where a reward has failed."""
        filtering, tally = self._config.settings.filtering, self._since.tally
        for answered, group in zip(batch, judged, strict=True):
            self._begun.discard(answered.number)
            if group is not None and (filtering is None or tally.sift([group], filtering)):
                self._ready.append(replace(answered, group=group))
        self._changed.set()
        self._fill()

    def state_dict(self) -> dict[str, Any]:
        return self._stream.call(self._state())

    async def _state(self) -> dict[str, Any]:
        async with self._judging:  # what is judged has changed the statistics of the rewards, and is not there yet
            return {
                "prompts": self._prompts.state_dict(),
                "rewards": self._rewards.state_dict(),
                "begun": sorted(self._begun),
                "ready": [[a.number, a.attempt, [stored(trajectory) for trajectory in a.group]] for a in self._ready],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before anything is sampled."""
        self._prompts.load_state_dict(state["prompts"])
        self._rewards.load_state_dict(state["rewards"])
        self._begun = set(state["begun"])
        self._ready = deque(
            Answered(number, attempt, [trajectory_of(each, self._prompts.at(number)) for each in group])
            for number, attempt, group in state["ready"]
        )


@dataclass
class _SinceLastStep:
    """What happened to completions since the last step took its own."""

    tally: Tally = field(default_factory=Tally)
    too_old: int = 0  # prompts
    episodes: int = 0
    errors: list[EpisodeError] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)  # of rewards, by their metric

    def add_failures(self, failures: Mapping[str, float]) -> None:
        for name, count in failures.items():
            self.failures[name] += int(count)

    def metrics(self) -> dict[str, float]:
        return {"asynchronous/too_old": float(self.too_old), **{n: float(count) for n, count in self.failures.items()}}


def _lag_metrics(taken: Sequence[Answered], step: int) -> dict[str, float]:
    """Of trajectories, how far their oldest tokens are behind, and the share that several versions have sampled."""
    trajectories = [trajectory for answered in taken for trajectory in answered.group]
    lags = [step - trajectory.weight_version for trajectory in trajectories]
    return {
        "asynchronous/lag": fmean(lags),
        "asynchronous/largest_lag": float(max(lags)),
        "asynchronous/several_versions_share": fmean(bool(trajectory.stretches) for trajectory in trajectories),
    }


class BetweenReplies(OwnDevices):
    """Engines get weights once the replies that they have begun are whole."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def publish(self) -> None:
        self._stream.hold()

    def sample(self) -> None:
        self._stream.release()
