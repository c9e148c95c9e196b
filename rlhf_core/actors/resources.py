"""Resource use of this job's ranks and engines, which each reports from a thread of its own while it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from rlhf_core.actors.calls import RESOURCES
from rlhf_core.system.resources import Sample

_SECONDS = 5.0  # for the slowest answer

_groups: list[Callable[[], Mapping[str, Any]]] = []  # of this process's job, in the order of their starts


@contextmanager
def measured(actors: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Let ActorResources ask a group of actors, by name, as long as the context lasts."""
    _groups.append(actors)
    try:
        yield
    finally:
        _groups.remove(actors)


class ActorResources:
    """Samples of all measured actors. One that has not answered is not asked again before it does."""

    def __init__(self) -> None:
        self._calls: dict[Any, tuple[Any, str]] = {}  # reference -> actor, and its name

    def samples(self) -> dict[str, Sample]:
        """Return the samples of those that answer in time; actors of a second group have its number behind theirs."""
        pending, names = {actor for actor, _ in self._calls.values()}, set[str]()
        for number, actors in enumerate(list(_groups), 1):
            for name, actor in list(actors().items()):
                shown = f"{name} of group {number}" if name in names else name
                names.add(name)
                if actor not in pending:
                    call = actor.resources.options(concurrency_group=RESOURCES).remote()
                    self._calls[call] = actor, shown
        if not self._calls:
            return {}
        ready, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=_SECONDS)
        samples = {}
        for call in ready:
            _, name = self._calls.pop(call)
            try:
                sample: Sample | None = ray.get(call)
            except ray.exceptions.RayError:  # it has ended; who calls it for its work reports that
                continue
            if sample is not None:
                samples[name] = sample
        return samples
