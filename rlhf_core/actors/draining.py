"""Nodes that are taken away: what Ray calls draining.

`watch` stops a job whose nodes are drained. As a command, `python -m rlhf_core.actors.draining SECONDS` drains the node
that it runs on, which is to be lost after so many seconds, and returns once no job has a part there: the hook of a
pod, or of a cloud's notice, calls it.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import ray
from ray._private.state import state
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # generated
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from rlhf_core.errors import PreemptedError, StageError
from rlhf_core.system.stopping import STOPS, Stop

_POLL_SECONDS = 2.0
_CLEANUP_SECONDS = 10.0  # of a job before its node is lost
_NO_DEADLINE = 1e6  # seconds; the node stays, it only takes no more work


@contextmanager
def watch(group: PlacementGroup) -> Iterator[None]:
    """Stop this job, to be resumed elsewhere, once a node of `group`, or its own, is drained."""
    nodes = {*_nodes_of(group), ray.get_runtime_context().get_node_id()}
    ended = threading.Event()
    threading.Thread(target=_watch, args=(nodes, ended), name="drained nodes", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(nodes: set[str], ended: threading.Event) -> None:
    while not ended.wait(_POLL_SECONDS):
        try:
            draining = state.get_draining_nodes()
        except RayError:  # the head restarts
            continue
        deadlines = [draining[node] for node in nodes if node in draining]
        if deadlines and not ended.is_set():
            left = min((ms / 1000 - time.time() for ms in deadlines if ms), default=_NO_DEADLINE)
            STOPS.request(Stop("a node of the job is taken away", PreemptedError), max(0.0, left - _CLEANUP_SECONDS))
            return


def _nodes_of(group: PlacementGroup) -> Iterable[str]:
    nodes: Mapping[str, str] = placement_group_table(group)["bundles_to_node_id"]
    return nodes.values()


def drain(node: str, seconds: float) -> None:
    """Announce that `node` is lost in `seconds`; Ray starts nothing more on it. Raises StageError if Ray refuses."""
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    deadline = round((time.time() + seconds) * 1000)
    accepted, reason = client.drain_node(
        node, DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "the node is taken away", deadline
    )
    if not accepted:
        raise StageError(f"Ray refused to drain the node {node}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rlhf_core.actors.draining", description="Drain this Ray node.")
    parser.add_argument("seconds", type=float, help="until the node is lost")
    seconds = parser.parse_args().seconds
    deadline = time.monotonic() + seconds
    ray.init(address="auto", log_to_driver=False)
    node = ray.get_runtime_context().get_node_id()
    drain(node, seconds)
    while _is_used(node) and time.monotonic() < deadline:
        time.sleep(1.0)


def _is_used(node: str) -> bool:
    """Return whether a stage has reserved something on the node."""
    groups = placement_group_table().values()
    return any(node in group["bundles_to_node_id"].values() and group["state"] == "CREATED" for group in groups)


if __name__ == "__main__":
    main()
