"""Comparison of a run's reservations with the resources of the Ray cluster of its jobs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import httpx

from rlhf_core.actors.room import NODES, Bundle, alive_nodes, autoscaling, is_starting, require_reservable, total
from rlhf_core.config.engines.placement import Reservation
from rlhf_core.errors import StageError
from rlhf_core.graph.graph import Node

_SECONDS = 3.0


def reservations(nodes: Iterable[Node]) -> dict[str, Reservation]:
    return {node.name: node.stage.reserves(node.config) for node in nodes}


def room_notes(reserved: Mapping[str, Reservation]) -> list[str]:
    """Return notes on reservations that differ from the free resources; empty without a configured cluster.

    Raises StageError, as the job would, for a reservation that no idle node of the cluster could satisfy.
    """
    address = os.environ.get("RAY_API_SERVER_ADDRESS") or ""
    if not address.startswith("http"):
        return []
    try:
        nodes = _nodes(address)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        return [f"the Ray cluster at {address} does not say what it has ({type(error).__name__})"]
    if is_starting(nodes):
        return [f"the Ray cluster at {address} is starting: no node has a CPU yet"]
    problems = _problems(reserved, nodes)
    if problems and not autoscaling():
        raise StageError(
            "; ".join(problems) + ". If nodes come on demand, set ALIGNMENT_AUTOSCALING=1 here and on the nodes"
        )
    return [*(f"{problem}: it would wait for more nodes" for problem in problems), *_unused(reserved, nodes)]


def _nodes(address: str) -> list[Bundle]:
    token = os.environ.get("RAY_AUTH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return alive_nodes(httpx.get(f"{address}{NODES}", headers=headers, timeout=_SECONDS).raise_for_status().json())


def _problems(reserved: Mapping[str, Reservation], nodes: list[Bundle]) -> list[str]:
    """Return one sentence for all stages with the same problem."""
    stages: dict[str, list[str]] = {}
    for name, reservation in reserved.items():
        try:
            require_reservable(reservation, nodes)
        except StageError as error:
            stages.setdefault(str(error), []).append(name)
    return [f"{', '.join(names)}: {problem}" for problem, names in stages.items()]


def _unused(reserved: Mapping[str, Reservation], nodes: list[Bundle]) -> list[str]:
    gpus = total(nodes).get("GPU", 0.0)
    idle = gpus - max((reservation.gpus for reservation in reserved.values()), default=0.0)
    if not reserved or idle <= 0:
        return []
    return [
        f"{idle:g} of the {gpus:g} GPUs of the Ray cluster are used by no stage: raise `placement.workers`, "
        "`placement.gpus_per_worker` or `rollout.engines`"
    ]
