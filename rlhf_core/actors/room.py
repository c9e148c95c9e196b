"""Checks that a Ray cluster has room for a reservation. Does not import Ray, which takes a second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf_core.config.engines.placement import Reservation
from rlhf_core.errors import StageError
from rlhf_core.system.variables import value_of

NODES = "/api/v0/nodes?limit=10000"  # of the dashboard; 10000 is its maximum

Bundle = dict[str, float]

_RESOLUTION = 1e-4  # Ray's resolution of amounts


def alive_nodes(answer: Any) -> list[Bundle]:
    """Return each node's resources from the response to NODES. Raises LookupError or TypeError for another response."""
    nodes = answer["data"]["result"]["result"]
    return [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]


def is_starting(nodes: Sequence[Bundle]) -> bool:
    """Return whether no node of a cluster can run anything yet: its head responds before its nodes have joined."""
    return not any(node.get("CPU") for node in nodes)


def autoscaling() -> bool:
    """Return whether nodes are added on demand, which Ray does not report. Raises VariableError."""
    return value_of("ALIGNMENT_AUTOSCALING") == "1"


def require_possible(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> None:
    """Raise StageError if idle `nodes` lack room for all bundles together, or for all those of one kind."""
    _require_total(total(bundles), nodes)
    for kind, count in Counter(tuple(sorted(bundle.items())) for bundle in bundles).items():
        bundle = dict(kind)
        room = sum(_capacity(bundle, node) for node in nodes)
        if room < count:
            capacities = "; ".join(in_words(node, bundle) for node in nodes)
            raise StageError(
                f"asked Ray for {count} times {in_words(bundle, bundle)}, each on one node, but the nodes have room "
                f"for {room} ({capacities}); ask for less, or for smaller parts"
            )


def require_reservable(reserved: Reservation, nodes: Sequence[Bundle]) -> None:
    """Raise StageError if idle `nodes` lack room for `reserved`. The job checks again by `require_possible`, with its
    number of actors of each kind."""
    _require_total({"CPU": reserved.cpus, **({"GPU": reserved.gpus} if reserved.gpus else {})}, nodes)
    for cpus, gpus in sorted(reserved.parts):
        require_possible([{"CPU": cpus, **({"GPU": gpus} if gpus else {})}], nodes)


def _require_total(needed: Bundle, nodes: Sequence[Bundle]) -> None:
    available = total(nodes)
    if any(available.get(name, 0.0) + _RESOLUTION < amount for name, amount in needed.items()):
        raise StageError(
            f"asked Ray for {in_words(needed, needed)}, the whole cluster has {in_words(available, needed)}; "
            "ask for less of it"
        )


def _capacity(bundle: Bundle, node: Bundle) -> int:
    """Return the number of such bundles that an idle node holds."""
    return min(math.floor(node.get(name, 0.0) / amount + _RESOLUTION) for name, amount in bundle.items() if amount > 0)


def total(bundles: Sequence[Bundle]) -> Bundle:
    names = sorted({name for bundle in bundles for name in bundle})
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def in_words(resources: Bundle, names: Iterable[str]) -> str:
    return " and ".join(_amount(name, resources.get(name, 0.0)) for name in names)


def _amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:.3g} GiB of memory" if name == "memory" else f"{amount:g} {name}s"
