"""Size of the cluster that a recipe needs, from what its stages reserve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.actors.room import Bundle, require_reservable
from rlhf_core.config.engines.placement import Reservation
from rlhf_core.errors import StageError
from rlhf_core.pipeline.estimates import Estimate

_GPUS_PER_NODE = 8
_GIB_PER_CPU = 4.0  # for data, libraries, and models on their way to a device


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """Nodes of one kind; `cpus`, `gpus` and `memory_gib` are of each."""

    nodes: int
    cpus: int
    gpus: int
    memory_gib: int


def cluster_size(
    reserved: Mapping[str, Reservation],
    estimated: Mapping[str, Estimate],
    *,
    nodes: int | None = None,
    cpus_per_node: int | None = None,
    gpus_per_node: int | None = None,
) -> ClusterSize:
    """Return the smallest cluster on which each stage of `reserved` fits, or check the one that is given.

    gpus_per_node: by default as many as the largest stage reserves, and at most 8.
    Raises StageError if a stage does not fit.
    """
    cpus, gpus = (max((getattr(r, name) for r in reserved.values()), default=0.0) for name in ("cpus", "gpus"))
    if gpus_per_node is None:
        gpus_per_node = min(math.ceil(gpus), _GPUS_PER_NODE)
    if nodes is None:
        nodes = max(1, _parts(gpus, gpus_per_node), _parts(cpus, cpus_per_node))
    if cpus_per_node is None:
        largest = max((part for r in reserved.values() for part, _ in r.parts), default=1.0)
        cpus_per_node = math.ceil(max(1.0, largest, cpus / nodes))
    _require_room(reserved, [{"CPU": float(cpus_per_node), "GPU": float(gpus_per_node)}] * nodes)
    held = max((_bytes(reserved[name], estimate) for name, estimate in estimated.items()), default=0.0)
    memory = max(_GIB_PER_CPU * cpus_per_node, held / nodes / 2**30)
    return ClusterSize(nodes, cpus_per_node, gpus_per_node, math.ceil(memory))


def _parts(whole: float, part: int | None) -> int:
    return math.ceil(whole / part) if part else 0


def _require_room(reserved: Mapping[str, Reservation], nodes: Sequence[Bundle]) -> None:
    for name, reservation in reserved.items():
        try:
            require_reservable(reservation, nodes)
        except StageError as error:
            raise StageError(
                f"{name}: {error}; or give more with --nodes, --gpus-per-node or --cpus-per-node"
            ) from error


def _bytes(reserved: Reservation, estimate: Estimate) -> float:
    """Return the bytes of a stage's models, as if each of its devices held the larger of both kinds of actor's."""
    return reserved.devices * max(estimate.memory.worker, estimate.memory.engine)
