"""Training ranks as Ray actors. The worker objects inside know nothing of Ray."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.actors.placement import reserve, worker_bundles, worker_threads
from rlhf_core.config.training import Placement
from rlhf_core.errors import AlignmentError, StageError

W = TypeVar("W")
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

START_SECONDS = 600.0
CALL_SECONDS = 6 * 3600.0
GRACE_SECONDS = 5.0  # for the other ranks' own errors, once one rank has failed

# Set before the actor imports numpy or torch.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_ASIDE = "aside"  # each actor's second thread


class _Rank:
    """The actor: joins the process group, builds the worker, and runs its methods."""

    def node(self) -> tuple[str, int]:
        """This node's address as the cluster knows it (loopback in a local cluster), and a port that is free now."""
        own = ray.get_runtime_context().get_node_id()
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def start(self, rank: int, size: int, address: str, threads: int, factory: Callable[..., Any], args: Any) -> None:
        # Imported here, when the threads' environment variables are set; the driver does not need torch.
        import torch

        from rlhf_core.training.distributed import join_group

        torch.set_num_threads(threads)
        join_group(rank=rank, size=size, address=address)
        self._worker = factory(*args)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._worker, method)(*args, **kwargs)


class RayWorkerGroup(Generic[W]):
    """A WorkerGroup of Ray actors, one per rank; see training.group.WorkerGroup. Ray must be connected.

    After a failed call the ranks may be out of step with each other: shut down the group.
    """

    def __init__(
        self,
        placement: Placement,
        factory: Callable[..., W],
        *args: Any,
        placement_group: PlacementGroup | None = None,
        timeout: float = CALL_SECONDS,
        start_timeout: float = START_SECONDS,
    ) -> None:
        """Each rank builds `factory(*args)`. Without `placement_group` one is reserved, and released at the end;
        with one, rank i runs in its bundle i.

        timeout: seconds that a call may take, start_timeout: that building may take once resources are reserved.
        Raises StageError if the cluster can never provide the resources, or a worker cannot be built.
        """
        self._timeout = timeout
        self._stack = ExitStack()
        with ExitStack() as started:
            started.callback(self.shutdown)
            if placement_group is None:
                placement_group = self._stack.enter_context(reserve(worker_bundles(placement)))
            self._actors = [self._create(placement, placement_group, rank) for rank in range(placement.workers)]
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
            max_restarts=0,  # a restarted rank would have lost its weights: the stage's job fails, and is retried whole
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

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """`worker.method(*args)` on every rank; the results by rank. Large arguments travel once."""
        return self._wait(method.__name__, self._start(method.__name__, [()] * self.size, args, kwargs))

    def scatter(
        self, method: Callable[Concatenate[W, S, P], R], shards: Sequence[S], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """`worker.method(shards[rank], *args)` on every rank; the results by rank."""
        name = method.__name__
        if len(shards) != self.size:
            raise ValueError(f"{name}: {len(shards)} shards for {self.size} ranks")
        return self._wait(name, self._start(name, [(shard,) for shard in shards], args, kwargs))

    def aside(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], list[R]]:
        """Start `worker.method(*args)` on every rank beside its other calls; the returned function waits for the
        results."""
        name = method.__name__
        calls = self._start(name, [()] * self.size, args, kwargs, thread=_ASIDE)
        return lambda: self._wait(name, calls)

    def _start(
        self,
        method: str,
        first: Sequence[tuple[Any, ...]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        thread: str | None = None,
    ) -> dict[Any, int]:
        """`worker.method(*first[rank], *args, **kwargs)` on every rank: call reference -> rank."""
        shared = [ray.put(argument) for argument in args]
        return {
            actor.call.options(concurrency_group=thread).remote(method, *first[rank], *shared, **kwargs): rank
            for rank, actor in enumerate(self._actors)
        }

    def _wait(self, method: str, calls: Mapping[Any, int], timeout: float | None = None) -> list[Any]:
        """The results of `calls` (reference -> rank), in their order. Raises StageError naming the rank, and the
        cause."""
        pending = list(calls)
        deadline = time.monotonic() + (timeout or self._timeout)
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = ", ".join(str(calls[call]) for call in pending)
                raise StageError(f"{method}: ranks {ranks} have not answered within {timeout or self._timeout:.0f} s")
            if _failure(ready[0]) is not None:
                raise _explain(method, calls)
        return list(ray.get(list(calls)))

    def shutdown(self) -> None:
        """End the actors and release what this group reserved. Idempotent."""
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

    A rank that dies breaks its peers' collectives, and their errors may arrive first.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    failures: list[tuple[int, int, RayError]] = []
    pending = list(calls)
    while pending and all(order >= 2 for order, _, _ in failures):
        finished, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not finished:
            break
        if (failure := _failure(finished[0])) is not None:
            failures.append((_causal_order(failure), calls[finished[0]], failure))
    _, rank, error = min(failures, key=lambda failure: failure[:2])
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


def _causal_order(error: RayError) -> int:
    """Causes first. 0: a worker that died; 1: an error of our own; 2: any other; 3: a broken connection to a peer."""
    if isinstance(error, RayActorError):
        return 0
    cause = getattr(error, "cause", None)
    if isinstance(cause, AlignmentError):
        return 1
    return 3 if type(cause).__name__ == "RuntimeError" and _names_a_connection(str(cause)) else 2


def _names_a_connection(message: str) -> bool:
    return any(word in message for word in ("gloo", "NCCL", "Connection closed by peer", "ProcessGroup"))
