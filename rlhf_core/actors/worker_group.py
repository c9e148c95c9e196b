"""Training ranks as Ray actors. Their worker objects are independent of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.actors import forwarding
from rlhf_core.actors.calls import ASIDE, CALL_SECONDS, THREADS, Actor, leave, own_gpus, wait
from rlhf_core.actors.placement import reserve, runtime_environment, worker_bundles
from rlhf_core.actors.resources import measured
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.plugins import required
from rlhf_core.contract import Before, Started
from rlhf_core.system.threads import use_threads

W = TypeVar("W")
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

START_SECONDS = 600.0

# Set before the actor imports numpy or torch.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class _Rank(Actor):
    """The actor of a rank: joins the process group, builds the worker, and runs its methods."""

    def host_store(self) -> str:
        """Host the rendezvous store of the ranks; return its address in the cluster (loopback in a local one)."""
        from rlhf_core.training.distributed import host_store

        node_id = ray.get_runtime_context().get_node_id()
        host = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
        self._store = host_store(host)
        return f"{host}:{self._store.port}"

    def gpus(self) -> list[str]:
        """Return the GPUs that Ray gave this rank, as in CUDA_VISIBLE_DEVICES."""
        return own_gpus()

    def start(self, join: Mapping[str, Any], threads: int, factory: Callable[..., Any], args: Any) -> None:
        """join: the arguments of join_group."""
        # Imports torch, hence only once the threads' environment variables are set, and not in the driver.
        from rlhf_core.training.distributed import join_group

        use_threads(threads)
        join_group(**join)
        self._worker = factory(*args)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._worker, method)(*args, **kwargs)


class RayWorkerGroup(Generic[W]):
    """A WorkerGroup of Ray actors, one per rank; see training.group.WorkerGroup. Ray must be connected.

    After a failed call the ranks may be out of sync: shut down the group.
    """

    def __init__(
        self,
        placement: Placement,
        factory: Callable[..., W],
        *args: Any,
        placement_group: PlacementGroup | None = None,
        first_bundle: int = 0,
        workers_per_bundle: int = 1,
        sequence: int = 1,
        tensor: int = 1,
        timeout: float = CALL_SECONDS,
        start_timeout: float = START_SECONDS,
    ) -> None:
        """Build `factory(*args)` on each rank.

        placement_group: already reserved, rank i in bundle first_bundle + i // workers_per_bundle; None: the group
        reserves its own.
        sequence, tensor: sizes of the ranks' mesh.
        timeout: of a call, in seconds; start_timeout: of building, once resources are reserved.
        Raises StageError if the cluster can never provide the resources, or a worker cannot be built.
        """
        self._ranks_of_replica = sequence * tensor
        self.before: Before = lambda method: None
        self._timeout = timeout
        self._stack = ExitStack()
        self._actors: list[Any] = []
        with ExitStack() as started:
            started.callback(self.shutdown)
            if placement_group is None:
                placement_group = self._stack.enter_context(reserve(worker_bundles(placement)))
            bundles = [first_bundle + rank // workers_per_bundle for rank in range(placement.workers)]
            self._actors = [self._create(placement, placement_group, bundle) for bundle in bundles]
            inherited = forwarding.received(), required()
            inherits = {
                actor.inherit.remote(f"rank {rank}", *inherited): f"rank {rank}"
                for rank, actor in enumerate(self._actors)
            }
            wait("start", inherits, start_timeout)
            address = wait("start", {self._actors[0].host_store.remote(): "rank 0"}, start_timeout)[0]
            join = {
                "size": placement.workers, "address": address, "sequence": sequence, "tensor": tensor,
                "timeout": timedelta(minutes=placement.timeout_minutes),
            }  # fmt: skip
            starts = {
                actor.start.remote({"rank": rank, **join}, placement.num_threads, factory, args): f"rank {rank}"
                for rank, actor in enumerate(self._actors)
            }
            wait("start", starts, start_timeout)
            self._stack.enter_context(measured(self._named))
            started.pop_all()

    def _create(self, placement: Placement, group: PlacementGroup, bundle: int) -> Any:
        environment = {name: str(placement.num_threads) for name in _THREAD_VARIABLES}
        rank: Any = ray.remote(concurrency_groups=THREADS)(_Rank)  # type: ignore[call-overload]  # not in its types
        actor: Any = rank.options(
            num_cpus=placement.cpus_per_worker,
            num_gpus=placement.gpus_per_worker,
            max_restarts=0,  # a restarted rank would have lost its weights: the stage's job fails, and is retried whole
            runtime_env=runtime_environment(environment),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
            ),
        ).remote()  # fmt: skip
        self._stack.callback(ray.kill, actor)
        return actor

    def _named(self) -> dict[str, Any]:
        return {f"rank {rank}": actor for rank, actor in enumerate(self._actors)}

    @property
    def size(self) -> int:
        return len(self._actors)

    @property
    def replicas(self) -> int:
        return self.size // self._ranks_of_replica

    def gpus(self) -> list[list[str]]:
        """Return the GPUs that Ray gave each rank, as in CUDA_VISIBLE_DEVICES."""
        return wait("start", {actor.gpus.remote(): f"rank {rank}" for rank, actor in enumerate(self._actors)})

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `worker.method(*args)` on every rank; return the results by rank. Large arguments are sent once."""
        return self.begin(method, *args, **kwargs).results()

    def begin(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Started[R]:
        """Start a call as `call` does, and return at once."""
        calls = self._start(method, [()] * self.size, args, kwargs)
        return Started(lambda: wait(method.__name__, calls, self._timeout), calls)

    def scatter(
        self, method: Callable[Concatenate[W, S, P], R], shards: Sequence[S], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call `worker.method(shards[replica], *args)` on the ranks of every replica; return the results by replica."""
        name = method.__name__
        if len(shards) != self.replicas:
            raise ValueError(f"{name}: {len(shards)} shards for {self.replicas} replicas")
        ranks = self._ranks_of_replica  # neighbours
        sent = self.put(shards) if ranks > 1 else shards
        shard_of_rank = [(shard,) for shard in sent for _ in range(ranks)]
        return wait(name, self._start(method, shard_of_rank, args, kwargs), self._timeout)[::ranks]

    def put(self, shards: Sequence[S]) -> Sequence[S]:
        """Put the shards into the object store, unless they are there."""
        # Ray hands the values of references to the ranks.
        references: list[Any] = [each if isinstance(each, ray.ObjectRef) else ray.put(each) for each in shards]
        return references

    def aside(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], list[R]]:
        """Start `worker.method(*args)` on every rank in parallel to its other calls; the returned function waits for
        the results."""
        calls = self._start(method, [()] * self.size, args, kwargs, thread=ASIDE)
        return lambda: wait(method.__name__, calls, self._timeout)

    def _start(
        self,
        method: Callable[..., Any],
        first: Sequence[tuple[Any, ...]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        thread: str | None = None,
    ) -> dict[Any, str]:
        """Start `worker.method(*first[rank], *args, **kwargs)` on every rank; return the ranks' names by reference."""
        self.before(method)
        shared = [ray.put(argument) for argument in args]
        return {
            actor.call.options(concurrency_group=thread).remote(
                method.__name__, *first[rank], *shared, **kwargs
            ): f"rank {rank}"
            for rank, actor in enumerate(self._actors)
        }

    def shutdown(self) -> None:
        """End the actors and release what this group reserved. Idempotent."""
        actors, self._actors = self._named(), []
        leave(actors)
        self._stack.close()
