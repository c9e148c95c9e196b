"""Asynchronous collection: completions are sampled and rewarded while earlier steps train.

At most `in_flight` prompts are being sampled or rewarded, or are ready. A step uses the first `prompts_per_step` that
are ready, and others start in their place, with the weights that the engines have then.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.episodes.stream import Stream
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.rewards import TrajectoryReward
from rlhf_core.rl.counts import PromptCounts
from rlhf_core.rl.filtering import Group, Tally
from rlhf_core.rl.hybrid import OwnDevices
from rlhf_core.rl.phases import PhaseTimer
from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.rl.rewarding import RewardPipeline, monitor
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.rl.stored import StoredGroups
from rlhf_core.rollout.engines import survive_dead_engines
from rlhf_core.types import Trajectory


@dataclass(frozen=True, slots=True)
class Answered:
    """The completions of one prompt."""

    number: int  # of the prompt's draw
    attempt: int  # counted from 0; resampling the draw adds 1
    group: Group

    @property
    def oldest(self) -> int:
        """The oldest version of the weights that sampled any of its tokens."""
        return min(trajectory.weight_version for trajectory in self.group)


class AsyncCollector:
    """A Collector that samples ahead of training. Its state is accessed on the event loop of `stream` only.

    A checkpoint has every prompt that was drawn and not trained on: with its completions if these have their rewards,
    else to be sampled again.
    """

    def __init__(
        self,
        config: RLConfig,
        prompts: PromptSampler,
        rollouts: RolloutSampler,
        rewards: RewardPipeline,
        monitors: Mapping[str, TrajectoryReward],
        stream: Stream,
        replace_dead: Callable[[], list[str]],
        stored: StoredGroups,
    ) -> None:
        """replace_dead: starts engines that have died again, with the weights of the others, and the stream. stored:
        the form of groups in checkpoints.
        """
        self._config, self._prompts, self._rollouts = config, prompts, rollouts
        self._rewards, self._monitors, self._stream = rewards, monitors, stream
        self._replace_dead, self._stored = replace_dead, stored
        self._judge_task: asyncio.Task[None] | None = None  # ends with its stream
        self._begun: set[int] = set()  # draws that are being sampled or rewarded
        self._sampled: list[Answered] = []  # awaiting rewards
        self._ready: deque[Answered] = deque()
        self._judging = asyncio.Lock()
        self._to_judge, self._changed = asyncio.Event(), asyncio.Event()
        self._since = _SinceLastStep()
        self.counts = PromptCounts()
        self._steps_ahead = 0  # number of steps whose prompts may be in flight or ready

    def collect(self, step: int, phase: PhaseTimer) -> tuple[list[Trajectory], dict[str, float]]:
        """See Collector. No trajectory is older than `max_lag` updates; the phase `rollout` is the time spent waiting.

        Raises the error of an engine, an episode or a reward, and StageError if filtering leaves too few prompts.
        """
        with phase("rollout"):
            collected, metrics = survive_dead_engines(
                lambda: self._stream.call(self._collect(step)),
                self._replace_dead,
                "the prompts that it has not completed are sampled again",
            )
        trajectories = [trajectory for answered in collected for trajectory in answered.group]
        with phase("reward"):
            metrics |= monitor(trajectories, self._monitors)
        return trajectories, metrics

    async def _collect(self, step: int) -> tuple[list[Answered], dict[str, float]]:
        wanted = self._config.prompts_per_step
        # The staleness bound of arXiv:2505.24298, section 5.1. Episodes that start now sample with the newest weights;
        # those that start while this step trains lag one more update when they are used.
        self._steps_ahead = self._config.max_lag + 1
        if self._judge_task is None or self._judge_task.cancelled():
            self._start()
        self._fill()
        while not self._is_enough(step):
            self._changed.clear()
            await self._stream.unless_it_fails(self._changed.wait())
        collected = [self._ready.popleft() for _ in range(min(wanted, len(self._ready)))]
        self.counts.collected += len(collected)
        metrics = {
            **_lag_metrics(collected, step),
            "asynchronous/waiting": float(len(self._ready)),
            **self._since.metrics(),
        }
        self._rollouts.count(self._since.errors)
        metrics |= self._rollouts.take_failures()
        if self._config.settings.filtering is not None:
            self._since.tally.rounds = math.ceil(len(self._since.tally.scores) / wanted)  # of synchronous sampling
            metrics |= self._since.tally.metrics(surplus=0)
        self._since = _SinceLastStep()
        self._steps_ahead -= 1
        self._fill()
        return collected, metrics

    def _is_enough(self, step: int) -> bool:
        """Return whether the step can start. Raises EpisodeError if more episodes failed than are tolerated."""
        wanted, filtering, since = self._config.prompts_per_step, self._config.settings.filtering, self._since
        least = wanted * self._config.settings.group_size
        self._rollouts.require_tolerable(since.errors, max(since.episodes, least))
        self._drop_too_old(step)
        if len(self._ready) >= wanted:
            return True
        if filtering is None or len(since.tally.scores) < filtering.max_rounds * wanted:
            return False
        if not self._ready or filtering.when_short == "stop":
            since.tally.rounds = filtering.max_rounds
            raise StageError(f"step {step}: {since.tally.complaint(len(self._ready), wanted)}")
        return True

    def _drop_too_old(self, step: int) -> None:
        settings = self._config.asynchronous
        assert settings is not None
        fresh = [answered for answered in self._ready if step - answered.oldest <= settings.max_lag]
        too_old = [answered for answered in self._ready if step - answered.oldest > settings.max_lag]
        self._ready = deque(fresh)
        self._since.too_old += len(too_old)
        if settings.too_old == "resample":
            for answered in too_old:
                self._begin(answered.number, answered.attempt + 1)
        else:
            self.counts.too_old += len(too_old)
        self._fill()

    def _start(self) -> None:
        """Begin with the draws that a checkpoint, or a stream whose engine died, has left."""
        self._judge_task = self._stream.begin(self._judge())
        for number in sorted(self._begun - {answered.number for answered in self._sampled}):
            self._begin(number, 0)

    def _fill(self) -> None:
        most = min(self._config.in_flight, self._steps_ahead * self._config.prompts_per_step)
        while len(self._begun) + len(self._ready) < most:
            self.counts.drawn += 1
            self._begin(self._prompts.next(), 0)

    def _begin(self, number: int, attempt: int) -> None:
        self._begun.add(number)
        self._stream.begin(self._answer(number, attempt))

    async def _answer(self, number: int, attempt: int) -> None:
        ask = self._stream.asker()  # one engine for all, which computes the prompt once
        episodes = self._rollouts.group(self._prompts.at(number), number, attempt)
        played = await asyncio.gather(*(play(ask) for play in episodes))
        errors = [each for each in played if isinstance(each, EpisodeError)]
        self._since.episodes += len(played)
        self._since.errors += errors
        if errors:
            self._drop(number)
        else:
            group = [each for each in played if not isinstance(each, EpisodeError)]
            self._sampled.append(Answered(number, attempt, group))
            self._to_judge.set()

    def _drop(self, number: int) -> None:
        self.counts.failed += 1
        self._begun.discard(number)
        self._changed.set()
        self._fill()

    async def _judge(self) -> None:
        """Reward sampled completions in batches, in a thread: a slow reward blocks neither engines nor ranks."""
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
        """Queue the groups that pass filtering. judged: the batch's groups with rewards; None where a reward failed."""
        filtering, tally = self._config.settings.filtering, self._since.tally
        for answered, group in zip(batch, judged, strict=True):
            self._begun.discard(answered.number)
            if group is None:
                self.counts.failed += 1
            elif filtering is None or tally.sift([group], filtering):
                self._ready.append(replace(answered, group=group))
            else:
                self.counts.filtered += 1
        self._changed.set()
        self._fill()

    def trained(self, trajectories: Sequence[Trajectory]) -> None:
        self.counts.steps += 1
        self.counts.trained += len(trajectories) // self._config.settings.group_size

    def proven(self) -> dict[str, float]:
        return self._stream.call(self._proven())

    async def _proven(self) -> dict[str, float]:
        cursor, in_flight = self._prompts.state_dict()["drawn"], len(self._begun) + len(self._ready)
        return self.counts.proven(self._config, cursor=cursor, in_flight=in_flight)

    def state_dict(self) -> dict[str, Any]:
        state, ready = self._stream.call(self._state())
        groups = self._stored.save([answered.group for answered in ready])
        waiting = [[a.number, a.attempt, group] for a, group in zip(ready, groups, strict=True)]
        return {**state, "ready": waiting}

    async def _state(self) -> tuple[dict[str, Any], list[Answered]]:
        """Return the state, and the completions that wait for a step."""
        async with self._judging:  # a batch with its rewards pending has already changed their statistics
            state = {
                "prompts": self._prompts.state_dict(),
                "rewards": self._rewards.state_dict(),
                "counts": self.counts.state_dict(),
                "begun": sorted(self._begun),
            }
            return state, list(self._ready)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Must be called before anything is sampled."""
        self._prompts.load_state_dict(state["prompts"])
        self._rewards.load_state_dict(state["rewards"])
        self.counts = PromptCounts.restored(state)
        self._begun = set(state["begun"])
        groups = self._stored.load([(self._prompts.at(number), group) for number, _, group in state["ready"]])
        self._ready = deque(
            Answered(number, attempt, group) for (number, attempt, _), group in zip(state["ready"], groups, strict=True)
        )


@dataclass
class _SinceLastStep:
    """Statistics of completions since the last step."""

    tally: Tally = field(default_factory=Tally)
    too_old: int = 0  # prompts
    episodes: int = 0
    errors: list[EpisodeError] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)  # of rewards, by metric name

    def add_failures(self, failures: Mapping[str, float]) -> None:
        for name, count in failures.items():
            self.failures[name] += int(count)

    def metrics(self) -> dict[str, float]:
        return {"asynchronous/too_old": float(self.too_old), **{n: float(count) for n, count in self.failures.items()}}


def _lag_metrics(collected: Sequence[Answered], step: int) -> dict[str, float]:
    """Return mean and largest lag of the trajectories' oldest tokens, and the share sampled by several versions."""
    trajectories = [trajectory for answered in collected for trajectory in answered.group]
    lags = [step - trajectory.weight_version for trajectory in trajectories]
    return {
        "asynchronous/lag": fmean(lags),
        "asynchronous/largest_lag": float(max(lags)),
        "asynchronous/several_versions_share": fmean(bool(trajectory.stretches) for trajectory in trajectories),
    }


class BetweenReplies(OwnDevices):
    """Turns that publish weights between replies: once all running replies are complete."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def publish(self) -> None:
        self._stream.hold()

    def sample(self) -> None:
        self._stream.release()
