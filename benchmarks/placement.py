"""Time to place bundles on many nodes: `python -m benchmarks.placement [--nodes 64] [--gpus 8] [--bundles 64 512]`.

Nodes are Ray's raylets on this machine, with GPUs that do not exist; about 130 MiB each. Measured is the product's own
reservation (rlhf_core/actors/placement.py) of one bundle of a CPU and a GPU for each worker, from the call
until all are reserved, and until they are free again. No actor is started.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from benchmarks.logprobs import machine
from benchmarks.record import store_figures
from rlhf_core.actors.placement import reserve, worker_bundles
from rlhf_core.actors.room import require_possible
from rlhf_core.config.engines.placement import Placement

_LOOPBACK = "127.0.0.1"
_OBJECTS = 80 * 2**20  # bytes of a node's object store, near the least
# Ray, which reads them at its import, else replaces a loopback address: see deployments/stack/services.py.
ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1"}


@dataclass(frozen=True, slots=True)
class Placed:
    checked: float  # seconds in which the product compares the bundles with the nodes
    reserved: float  # from the call until all bundles are reserved, with the check
    released: float


@contextmanager
def nodes_of(count: int, gpus: int, objects: int = _OBJECTS) -> Iterator[list[float]]:
    """Start a head without resources and `count` nodes; yield the seconds that each took, and end them all.

    objects: bytes of each node's object store.
    """
    common: dict[str, Any] = {"node_ip_address": _LOOPBACK, "object_store_memory": objects}
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        cluster: Any = Cluster()
        try:
            cluster.add_node(num_cpus=0, include_dashboard=False, temp_dir=folder, **common)
            taken = []
            for _ in range(count):
                began = time.perf_counter()
                cluster.add_node(num_cpus=gpus, num_gpus=gpus, wait=False, **common)
                taken.append(time.perf_counter() - began)
            cluster.wait_for_nodes(timeout=300.0)
            ray.init(address=cluster.address, _node_ip_address=_LOOPBACK, log_to_driver=False)
            yield taken
        finally:
            ray.shutdown()
            cluster.shutdown()


def place(bundles: int) -> Placed:
    wanted = worker_bundles(Placement(workers=bundles, cpus_per_worker=1, gpus_per_worker=1))
    began = time.perf_counter()
    require_possible(wanted, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    checked = time.perf_counter() - began
    began = time.perf_counter()
    with reserve(wanted):
        reserved = time.perf_counter() - began
        began = time.perf_counter()
    while ray.available_resources().get("GPU", 0.0) < ray.cluster_resources()["GPU"]:
        time.sleep(0.01)
    return Placed(checked, reserved, time.perf_counter() - began)


def memory() -> float:
    """Return the GiB of this process and its children, with shared pages divided among their processes."""
    own = psutil.Process()
    used = 0
    for process in (own, *own.children(recursive=True)):
        try:
            used += process.memory_full_info().pss
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
    return used / 2**30


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=8, help="of a node")
    parser.add_argument("--bundles", type=int, nargs="+", default=[64, 512], help="of one GPU")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if not ENVIRONMENT.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.placement", *(sys.argv[1:] if arguments is None else arguments)]
        subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT})
        return
    console = Console(width=140)
    console.print(machine())
    with nodes_of(options.nodes, options.gpus) as started:
        console.print(
            f"{len(started)} nodes of {options.gpus} GPUs: started in {sum(started):.0f} s, the last in "
            f"{started[-1]:.1f} s; {memory():.1f} GiB; load average {os.getloadavg()[0]:.1f}"
        )
        table = Table("bundles", "checked, s", "reserved, s: median", "least", "most", "released, s")
        figures = {}
        for bundles in options.bundles:
            done = [place(bundles) for _ in range(options.repeats)]
            times = [each.reserved for each in done]
            figures[f"{bundles} bundles"] = {
                "median_seconds": statistics.median(times), "least_seconds": min(times), "most_seconds": max(times)
            }  # fmt: skip
            table.add_row(
                str(bundles), f"{statistics.median(each.checked for each in done):.3f}",
                f"{statistics.median(times):.3f}", f"{min(times):.3f}", f"{max(times):.3f}",
                f"{statistics.median(each.released for each in done):.3f}",
            )  # fmt: skip
        console.print(table)
        store_figures(figures)


if __name__ == "__main__":
    main()
