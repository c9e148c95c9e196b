"""Calls of actors, awaited together; a failure raises one error that names its cause."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlhf_core.actors import forwarding
from rlhf_core.config.plugins import require
from rlhf_core.errors import ActorDiedError, AlignmentError, StageError, reason_of
from rlhf_core.processes.lines import how_it_ended
from rlhf_core.system.metering import METER, ProcessUse, gpu_joules, peak_device_bytes, peak_host_bytes, reset_peak
from rlhf_core.system.resources import ProcessTree, Sample
from rlhf_core.system.scratch import remove_all
from rlhf_core.system.stacks import register, unregister

CALL_SECONDS = 6 * 3600.0
_LESS_MEMORY = "lower `tokens_per_micro_batch`, `rollout.max_sequences` or `rollout.cpu_cache_gib`"
GRACE_SECONDS = 5.0  # to collect errors of other actors, once one has failed
ASIDE = "aside"  # concurrency group: each actor's second thread
RESOURCES = "resources"  # likewise its third
THREADS = {ASIDE: 1, RESOURCES: 1}
_LEAVE_SECONDS = 2.0  # of a stopped job's 10; a responsive actor returns at once


def wait(
    what: str,
    calls: Mapping[Any, str],
    seconds: float = CALL_SECONDS,
    needed: Mapping[Any, str] = MappingProxyType({}),
) -> list[Any]:
    """Return the results of `calls` (reference -> name of the actor), in their order.

    needed: calls without which these may never end, such as those that send what these receive.
    Raises StageError, naming the actor, `what` it did and the cause, as soon as one of either fails; an AlignmentError
    of an actor keeps its class.
    """
    both = {**calls, **needed}
    pending = list(both)
    deadline = time.monotonic() + seconds
    while not calls.keys().isdisjoint(pending):
        ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            waiting = ", ".join(both[call] for call in pending)
            raise StageError(f"{what}: no answer from {waiting} within {seconds:.0f} s")
        if _failure(ready[0]) is not None:
            raise _explain(what, both)
    return list(ray.get(list(calls)))


class Actor:
    """Base of a job's actors: the first and the last call of each, and what it uses in between."""

    _joules: Mapping[str, float] = MappingProxyType({})  # counters of its GPUs at its start
    _tree: ProcessTree | None = None

    def inherit(self, name: str, environment: Mapping[str, str], plugins: Mapping[str, str]) -> None:
        """Set the job's environment variables, which libraries read on import, and require its plugins.

        Called first: unpickling arguments of later calls imports both. Raises PluginError.
        """
        reset_peak()
        forwarding.inherit(environment)
        require(plugins)
        register(name, ray.get_runtime_context().get_job_id())
        self._joules = gpu_joules(own_gpus())
        self._tree = ProcessTree(own_gpus())

    def resources(self) -> Sample | None:
        """Return what this process uses; None before its first call."""
        return None if self._tree is None else self._tree.sample()

    def leave(self) -> ProcessUse:
        """Return what this process took, and remove its temporary folders. Called last, by the function `leave`."""
        joules = {gpu: now - self._joules[gpu] for gpu, now in gpu_joules(own_gpus()).items() if gpu in self._joules}
        use = ProcessUse(peak_host_bytes(), peak_device_bytes(), joules)
        remove_all()
        unregister()
        return use


def leave(actors: Mapping[str, Any]) -> None:
    """Call `leave` of `actors`, by name, before they are killed: a killed process does not remove its folders."""
    # On the second thread, since the first may hang; calls of a dead actor fail at once.
    leaving = {actor.leave.options(concurrency_group=ASIDE).remote(): name for name, actor in actors.items()}
    if not leaving:
        return
    left, _ = ray.wait(list(leaving), num_returns=len(leaving), timeout=_LEAVE_SECONDS)
    for call in left:
        if _failure(call) is None:
            METER.ended(leaving[call], ray.get(call))


def failing(calls: Mapping[Any, str], seconds: float = CALL_SECONDS) -> list[str]:
    """Return the names of the actors whose calls failed, or have not returned within `seconds`."""
    ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=seconds)
    return [calls[call] for call in late] + [calls[call] for call in ready if _failure(call) is not None]


def own_gpus() -> list[str]:
    """Return the GPUs that Ray has given this actor, as in CUDA_VISIBLE_DEVICES."""
    given: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return given


def _failure(call: Any) -> RayError | None:
    """Return the error of a finished call; None if it succeeded."""
    try:
        ray.get(call)
    except RayError as error:
        return error
    return None


def _explain(what: str, calls: Mapping[Any, str]) -> AlignmentError:
    """Return the error to raise once an actor has failed: of all actors' errors, the one that caused the others.

    A rank that dies breaks its peers' collectives, and their errors may arrive first.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    failures: list[tuple[int, str, RayError]] = []
    pending = list(calls)
    while pending and all(order >= 2 for order, _, _ in failures):
        finished, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not finished:
            break
        if (failure := _failure(finished[0])) is not None:
            failures.append((_causal_order(failure), calls[finished[0]], failure))
    _, actor, error = min(failures, key=lambda failure: failure[:2])
    cause = error.cause if isinstance(error, RayTaskError) else None
    explained: AlignmentError
    if isinstance(cause, AlignmentError):
        explained = type(cause)(f"{actor}: {cause}")
    elif cause is not None:
        explained = StageError(f"{actor} failed in {what}: {type(cause).__name__}: {reason_of(cause)}")
    else:
        message = " ".join(str(error).split())
        died = StageError if _lost_its_node(message) else ActorDiedError
        explained = died(f"{actor} died in {what}: {_cause_of_death(message)}")
    explained.__cause__ = error
    return explained


def _cause_of_death(message: str) -> str:
    """Return the likely cause, then Ray's message, which lists possible causes and does not know the signal."""
    if "low on memory" in message:
        cause = f"Ray ended it because its node ran low on memory: {_LESS_MEMORY}"
    elif _lost_its_node(message):
        cause = "its node was lost"
    elif "unavailable" in message:
        cause = "Ray does not reach its process, which may be alive: its node is too busy, or the network failed"
    elif status := re.search(r"exit code (-?\d+)|exit_code=(\d+)", message):
        cause = f"its process {how_it_ended(int(status[1] or status[2]))}: see its log in the Ray dashboard"
    else:
        cause = f"its process was killed, usually because memory ran out: {_LESS_MEMORY}"
    return f"{cause}. Ray says: {message}"


def _lost_its_node(message: str) -> bool:
    return "node has died" in message or "node died" in message


def _causal_order(error: RayError) -> int:
    """Return a sort key, causes first. 0: a dead worker; 1: an AlignmentError; 2: any other; 3: a lost peer."""
    if isinstance(error, RayActorError):
        return 0
    cause = getattr(error, "cause", None)
    if isinstance(cause, AlignmentError):
        return 1
    return 3 if type(cause).__name__ == "RuntimeError" and _names_a_connection(str(cause)) else 2


def _names_a_connection(message: str) -> bool:
    return any(word in message for word in ("gloo", "NCCL", "Connection closed by peer", "ProcessGroup"))
