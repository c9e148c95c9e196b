"""Whether a cluster of Ray has room for what is asked of it. Without Ray itself, which takes a second to import."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf_core.config.engines.placement import Reservation
from rlhf_core.errors import StageError
from rlhf_core.system.variables import value_of

NODES = "/api/v0/nodes?limit=10000"  # of the dashboard; the most that it lists

Bundle = dict[str, float]

_RESOLUTION = 1e-4  # Ray counts in these


def alive_nodes(answer: Any) -> list[Bundle]:
    """The resources of each, from the dashboard's answer to NODES. Raises LookupError or TypeError if it is another."""
    nodes = answer["data"]["result"]["result"]
    return [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]


def is_starting(nodes: Sequence[Bundle]) -> bool:
    """Whether no node of a cluster can run anything yet: its head answers before its nodes have joined it."""
    return not any(node.get("CPU") for node in nodes)


def autoscaling() -> bool:
    """Whether nodes come on demand, which Ray does not tell. Raises VariableError."""
    return value_of("ALIGNMENT_AUTOSCALING") == "1"


def require_possible(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> None:
    """Raises StageError if idle `nodes` lack room for all bundles together, or for all those of one kind."""
    _require_total(total(bundles), nodes)
    for bundle in bundles:
        wanted, room = bundles.count(bundle), sum(_how_often(bundle, node) for node in nodes)
        if room < wanted:
            there_are = "; ".join(in_words(node, bundle) for node in nodes)
            raise StageError(
                f"asked Ray for {wanted} times {in_words(bundle, bundle)}, each on one node, but the nodes have room "
                f"for {room} ({there_are}); ask for less, or for smaller parts"
            )


def require_reservable(reserved: Reservation, nodes: Sequence[Bundle]) -> None:
    """Raises StageError if idle `nodes` lack room for it. A job asks again by `require_possible`, with how many actors
    it has of each kind."""
    _require_total({"CPU": reserved.cpus, **({"GPU": reserved.gpus} if reserved.gpus else {})}, nodes)
    for cpus, gpus in sorted(reserved.parts):
        require_possible([{"CPU": cpus, **({"GPU": gpus} if gpus else {})}], nodes)


def _require_total(asked: Bundle, nodes: Sequence[Bundle]) -> None:
    available = total(nodes)
    if any(available.get(name, 0.0) + _RESOLUTION < amount for name, amount in asked.items()):
        raise StageError(
            f"asked Ray for {in_words(asked, asked)}, the whole cluster has {in_words(available, asked)}; "
            "ask for less of it"
        )


def _how_often(bundle: Bundle, node: Bundle) -> int:
    """How many of such bundles an idle node holds."""
    return min(math.floor(node.get(name, 0.0) / amount + _RESOLUTION) for name, amount in bundle.items() if amount > 0)


def total(bundles: Sequence[Bundle]) -> Bundle:
    names = sorted({name for bundle in bundles for name in bundle})
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def in_words(resources: Bundle, names: Iterable[str]) -> str:
    return " and ".join(_amount(name, resources.get(name, 0.0)) for name in names)


def _amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:.3g} GiB of memory" if name == "memory" else f"{amount:g} {name}s"
