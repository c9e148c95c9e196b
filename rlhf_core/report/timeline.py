"""The stages of a run over time: when each was attempted, how that ended, and what it waited for; the phases of RL."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.attempts import attempt_of
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.errors import shortened
from rlhf_core.report.content import Curves
from rlhf_core.report.formatting import duration
from rlhf_core.report.node_view import NodeView

_PHASE = "seconds/"
_LONGEST_REASON = 300  # characters
_MOST_TICKS = 5
_TICKS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 3 * 3600, 6 * 3600, 12 * 3600, 24 * 3600)  # seconds
_SHORTEST_GAP, _SMALLEST_GAP = 2.0, 0.01  # seconds, and of the time line: less is what the start of any job takes


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt. Places are percents of the time line."""

    left: float
    width: float
    waited: float  # percent of the bar
    outcome: str
    is_other: bool  # another run's
    text: str  # all of it in words


@dataclass(frozen=True, slots=True)
class Lane:
    node: NodeView
    bars: Sequence[Bar]
    gap: tuple[float, float] | None  # left and width: from when its inputs were there until it began
    summary: str


@dataclass(frozen=True, slots=True)
class TimeLine:
    seconds: float
    lanes: Sequence[Lane]
    tick: float  # percent between two ticks
    ticks: Sequence[tuple[float, float]]  # place, and seconds since the start


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    seconds: float
    share: float  # percent of all phases


def time_line(
    run_id: str, started_at: datetime, ended_at: datetime, nodes: Sequence[NodeView],
    attempts: Mapping[str, Sequence[Attempt]], inputs: Mapping[str, Mapping[str, ArtifactRef]],
) -> TimeLine:  # fmt: skip
    """Return the time line of a run, its stages in the order in which they began. ended_at: now, while it runs.

    attempts: by stage, those of other runs too, which are shown as far as they fall into this time.
    """
    known = {node.name: _attempts(node, attempts.get(node.name, ())) for node in nodes}
    own = [each for of_node in known.values() for each in of_node if each.run_id == run_id]
    start = min([started_at, *(each.started_at for each in own)])
    end = max([ended_at, *(each.seen_at for each in own)])
    seconds = max((end - start).total_seconds(), 1.0)
    end = start + timedelta(seconds=seconds)
    shown = {
        name: [each for each in of_node if each.seen_at >= start and each.started_at <= end]
        for name, of_node in known.items()
    }
    ends = {node.ref: max([each.seen_at for each in shown[node.name]], default=start) for node in nodes}

    def percent(at: datetime) -> float:
        return min(max(100 * (at - start).total_seconds() / seconds, 0.0), 100.0)

    def lane(node: NodeView) -> Lane:
        ready = max([start, *(ends[ref] for ref in inputs.get(node.name, {}).values() if ref in ends)])
        began = next((each.started_at for each in shown[node.name] if not _is_other(each, run_id)), ready)
        waited = (began - ready).total_seconds()
        gap = waited if waited > max(_SHORTEST_GAP, _SMALLEST_GAP * seconds) else 0.0
        return Lane(
            node, [_bar(node, each, percent, _is_other(each, run_id)) for each in shown[node.name]],
            (percent(ready), percent(began) - percent(ready)) if gap else None, _summary(node, shown[node.name], gap),
        )  # fmt: skip

    lanes = sorted(map(lane, nodes), key=lambda each: each.bars[0].left if each.bars else math.inf)
    tick = next((tick for tick in _TICKS if seconds / tick <= _MOST_TICKS), seconds / _MOST_TICKS)
    ticks = [(100 * number * tick / seconds, number * tick) for number in range(int(seconds / tick) + 1)]
    return TimeLine(seconds, lanes, 100 * tick / seconds, ticks)


def phases(curves: Curves) -> list[Phase]:
    """Return the phases of an RL stage, each with its seconds over all steps."""
    sums = {
        name.removeprefix(_PHASE): math.fsum(value for _, value in points if math.isfinite(value))
        for name, points in curves.items()
        if name.startswith(_PHASE)
    }
    total = math.fsum(sums.values())
    return [Phase(name, seconds, 100 * seconds / total) for name, seconds in sums.items() if seconds > 0]


def _attempts(node: NodeView, attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the attempts in their order; of a record without them the one that the manifest tells of."""
    if not attempts and node.manifest is not None:
        return [attempt_of(node.manifest)]
    return sorted(attempts, key=lambda each: each.started_at)


def _is_other(attempt: Attempt, run_id: str) -> bool:
    """Return whether another run made the attempt; manifests of earlier releases do not say which did."""
    return attempt.run_id not in ("", run_id)


def _seconds(attempt: Attempt) -> float:
    return max(0.0, (attempt.seen_at - attempt.started_at).total_seconds())


def _bar(node: NodeView, attempt: Attempt, percent: Callable[[datetime], float], is_other: bool) -> Bar:
    seconds, left = _seconds(attempt), percent(attempt.started_at)
    words = [
        f"{node.name}: {attempt.outcome}, {attempt.started_at:%H:%M:%S} to {attempt.seen_at:%H:%M:%S}"
        f" ({duration(seconds)})",
        f"waited {duration(attempt.waited)} for room" if attempt.waited else "",
        "of another run" if is_other else "",
        shortened(attempt.reason, _LONGEST_REASON),
    ]
    return Bar(
        left, percent(attempt.seen_at) - left, min(100.0, 100 * attempt.waited / seconds) if seconds else 0.0,
        attempt.outcome, is_other, "; ".join(filter(None, words)),
    )  # fmt: skip


def _summary(node: NodeView, attempts: Sequence[Attempt], gap: float) -> str:
    if not attempts:
        return node.state
    words = [f"{each.outcome} after {duration(_seconds(each))}" for each in attempts]
    waited = sum(each.waited for each in attempts)
    if waited:
        words.append(f"waited {duration(waited)} for room")
    if gap:
        words.append(f"began {duration(gap)} after its inputs")
    return ", ".join(words)
