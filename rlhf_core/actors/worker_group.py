"""Training ranks as Ray actors. The worker objects inside know nothing of Ray."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.actors.placement import reserve, worker_bundles, worker_threads
from rlhf_core.config.training import Placement
from rlhf_core.errors import AlignmentError, StageError

START_SECONDS = 600.0
CALL_SECONDS = 6 * 3600.0
GRACE_SECONDS = 5.0  # for the other ranks' own errors, once one rank has failed

# Set before the actor imports numpy or torch.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_ASIDE = "aside"  # each actor's second thread


class _Rank:
    """The actor: joins the process group, builds the worker, and runs its methods."""

    def node(self) -> tuple[str, int]:
        """This node's address as the cluster knows it (loopback, if the cluster is), and a port that is free now."""
        own = ray.get_runtime_context().get_node_id()
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def start(self, rank: int, size: int, address: str, threads: int, factory: Callable[..., Any], args: Any) -> None:
        # Imported here: the threads' environment is set by now, and torch is no business of the driver.
        import torch

        from rlhf_core.training.distributed import join_group

        torch.set_num_threads(threads)
        join_group(rank=rank, size=size, address=address)
        self._worker = factory(*args)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        yield from getattr(self._worker, method)(*args)

    def drain(self, method: str, *args: Any) -> None:
        for _ in getattr(self._worker, method)(*args):
            pass


class RayWorkerGroup:
    """A WorkerGroup of Ray actors, one a rank; see training.group.WorkerGroup. Ray must be connected.

    After a failed call the ranks may be out of step with each other: shut the group down.
    """

    def __init__(
        self,
        placement: Placement,
        factory: Callable[..., Any],
        *args: Any,
        placement_group: PlacementGroup | None = None,
        first_bundle: int = 0,
        timeout: float = CALL_SECONDS,
        start_timeout: float = START_SECONDS,
    ) -> None:
        """Each rank builds `factory(*args)`. Without `placement_group` one is reserved, and given back at the end;
        with one, rank i runs in its bundle first_bundle + i.

        timeout: seconds a call may take, start_timeout: the building, once the resources are there.
        Raises StageError if the cluster can never give the resources, or a worker cannot be built.
        """
        self._timeout = timeout
        self._stack = ExitStack()
        with ExitStack() as started:
            started.callback(self.shutdown)
            if placement_group is None:
                placement_group = self._stack.enter_context(reserve(worker_bundles(placement)))
            self._actors = [
                self._create(placement, placement_group, first_bundle + rank) for rank in range(placement.workers)
            ]
            host, port = self._wait("start", {self._actors[0].node.remote(): 0}, timeout=start_timeout)[0]
            threads, size = worker_threads(placement), placement.workers
            starts = {
                actor.start.remote(rank, size, f"{host}:{port}", threads, factory, args): rank
                for rank, actor in enumerate(self._actors)
            }
            self._wait("start", starts, timeout=start_timeout)
            started.pop_all()

    def _create(self, placement: Placement, group: PlacementGroup, bundle: int) -> Any:
        environment = {name: str(worker_threads(placement)) for name in _THREAD_VARIABLES}
        rank: Any = ray.remote(concurrency_groups={_ASIDE: 1})(_Rank)  # type: ignore[call-overload]  # not in its types
        actor: Any = rank.options(
            num_cpus=placement.cpus_per_worker,
            num_gpus=placement.gpus_per_worker,
            max_restarts=0,  # a rank that comes back has lost its weights: the stage's supervisor restarts all
            runtime_env={"env_vars": environment},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
            ),
        ).remote()  # fmt: skip
        self._stack.callback(ray.kill, actor)
        return actor

    @property
    def size(self) -> int:
        return len(self._actors)

    def call(self, method: str, *args: Any) -> list[Any]:
        """`worker.method(*args)` on every rank; the results by rank. Large arguments travel once."""
        shared = [ray.put(argument) for argument in args]
        calls = {actor.call.remote(method, *shared): rank for rank, actor in enumerate(self._actors)}
        return self._wait(method, calls)

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """`worker.method(shards[rank], *args)` on every rank; the results by rank."""
        if len(shards) != self.size:
            raise ValueError(f"{method}: {len(shards)} shards for {self.size} ranks")
        shared = [ray.put(argument) for argument in args]
        calls = {actor.call.remote(method, shards[rank], *shared): rank for rank, actor in enumerate(self._actors)}
        return self._wait(method, calls)

    def aside(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Begin `worker.method(*args)` on every rank beside its other calls; what is returned waits for the results."""
        calls = {
            actor.call.options(concurrency_group=_ASIDE).remote(method, *args): rank
            for rank, actor in enumerate(self._actors)
        }
        return lambda: self._wait(method, calls)

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        """Run the generator method on every rank to its end; yields rank 0's items as they come.

        The ranks run at their own pace, not the consumer's. Raises as `call` does.
        """
        shared = [ray.put(argument) for argument in args]
        items = self._actors[0].stream.options(num_returns="streaming").remote(method, *shared)
        others = {actor.drain.remote(method, *shared): rank for rank, actor in enumerate(self._actors) if rank > 0}
        deadline = time.monotonic() + self._timeout
        while True:
            # Whichever comes first: rank 0 may hang in a collective because another rank has failed.
            ready, _ = ray.wait([items, *others], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise StageError(f"{method}: no news for {self._timeout:.0f} s from ranks {[0, *others.values()]}")
            if ready[0] in others:
                self._wait(method, {ready[0]: others.pop(ready[0])}, others)
                continue
            try:
                item = next(items)
            except StopIteration:
                break
            yield self._wait(method, {item: 0}, others)[0]
            deadline = time.monotonic() + self._timeout
        self._wait(method, others)

    def _wait(
        self,
        method: str,
        calls: Mapping[Any, int],
        bystanders: Mapping[Any, int] = MappingProxyType({}),
        timeout: float | None = None,
    ) -> list[Any]:
        """The results of `calls` (reference -> rank), in their order. `bystanders` are other ranks' unfinished calls,
        which may know better why one of these has failed. Raises StageError naming the rank, and the cause."""
        pending = list(calls)
        deadline = time.monotonic() + (timeout or self._timeout)
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = ", ".join(str(calls[call]) for call in pending)
                raise StageError(f"{method}: ranks {ranks} have not answered within {timeout or self._timeout:.0f} s")
            if _failure(ready[0]) is not None:
                raise _explain(method, {**calls, **bystanders})
        return list(ray.get(list(calls)))

    def shutdown(self) -> None:
        """End the actors and give back what this group reserved. May be called twice."""
        self._stack.close()


def _failure(call: Any) -> RayError | None:
    """Why a finished call failed, if it did."""
    try:
        ray.get(call)
    except RayError as error:
        return error
    return None


def _explain(method: str, calls: Mapping[Any, int]) -> AlignmentError:
    """The error to raise once a rank has failed: of all ranks' errors, the one that is the cause of the others.

    A rank that dies breaks its peers' collectives, and their complaints may arrive first.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    failures: list[tuple[int, int, RayError]] = []
    pending = list(calls)
    while pending and all(likeness >= 2 for likeness, _, _ in failures):
        finished, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not finished:
            break
        if (failure := _failure(finished[0])) is not None:
            failures.append((_likeness_to_consequence(failure), calls[finished[0]], failure))
    _, rank, error = min(failures, key=lambda found: found[:2])
    cause = error.cause if isinstance(error, RayTaskError) else None
    explained: AlignmentError
    if isinstance(cause, AlignmentError):
        explained = type(cause)(f"rank {rank}: {cause}")
    elif cause is not None:
        explained = StageError(f"rank {rank} failed in {method}: {type(cause).__name__}: {cause}")
    else:
        explained = StageError(f"rank {rank} died in {method}: {' '.join(str(error).split())}")
    explained.__cause__ = error
    return explained


def _likeness_to_consequence(error: RayError) -> int:
    """0: a worker that died; 1: an error of our own; 2: any other; 3: a broken connection to another rank."""
    if isinstance(error, RayActorError):
        return 0
    cause = getattr(error, "cause", None)
    if isinstance(cause, AlignmentError):
        return 1
    return 3 if type(cause).__name__ == "RuntimeError" and _speaks_of_peers(str(cause)) else 2


def _speaks_of_peers(message: str) -> bool:
    return any(word in message for word in ("gloo", "NCCL", "Connection closed by peer", "ProcessGroup"))
