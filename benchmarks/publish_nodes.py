"""Seconds of a publish of 1 GiB between two nodes, by transport: `python -m benchmarks.publish_nodes`.

A sender and a receiver, each an actor on a Ray node of its own on this machine: objects travel between the stores of
nodes by sockets, as between machines. Both compute digests, as ranks and engines do, and the receiver copies tensors
into its model. The folder's files go as in the product: from the rank by the driver, on the same node, to a folder of
the engine.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.table import Table

from benchmarks.logprobs import machine
from benchmarks.placement import ENVIRONMENT, nodes_of
from benchmarks.publish import REPEATS, load, matrices
from benchmarks.record import store_figures
from rlhf_core.rollout.transport.base import Offer, Transport, WeightManifest, digested
from rlhf_core.rollout.transport.folder import Files, SharedFolder, read_files, received
from rlhf_core.rollout.transport.table import TRANSPORTS
from rlhf_core.training.distributed import host_store

NAMES = ("folder", "collective")  # `ipc` stays on one node
_OBJECTS = 4 * 2**30  # bytes of a node's object store


class Sender:
    """The rank."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._weights, self._publishing = matrices(), ExitStack()

    def offer(self, name: str) -> tuple[Transport, WeightManifest]:
        manifest = WeightManifest.of(1, self._weights)
        offer = Offer(manifest, 1, 1, False, 1, None, rendezvous=lambda: host_store("127.0.0.1"))
        self._transport = self._publishing.enter_context(TRANSPORTS[name](offer))
        return self._transport, manifest

    def send(self, manifest: WeightManifest) -> dict[str, str]:
        digests: dict[str, str] = {}
        self._transport.send(digested(self._weights.items(), digests), manifest)
        return digests

    def files(self) -> Files:
        assert isinstance(self._transport, SharedFolder)
        return read_files(self._transport.folder)

    def withdraw(self) -> None:
        self._publishing.close()


class Receiver:
    """The engine."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model: dict[str, torch.Tensor] = {}

    def receive(self, transport: Transport, manifest: WeightManifest) -> dict[str, str]:
        return load(self._model, transport.receive(manifest))

    def receive_files(self, files: Files, manifest: WeightManifest) -> dict[str, str]:
        with received(files) as folder:
            return self.receive(SharedFolder(folder), manifest)


def _actor(of: type, node: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(of).options(num_cpus=0, scheduling_strategy=strategy).remote()


def publish(name: str, sender: Any, receiver: Any) -> float:
    """Return the seconds from the offer to the end of the load."""
    began = time.perf_counter()
    transport, manifest = ray.get(sender.offer.remote(name))
    sending = sender.send.remote(manifest)
    if transport.concurrent:
        loading = receiver.receive.remote(transport, manifest)
        sent, loaded = ray.get([sending, loading])
    else:
        sent = ray.get(sending)
        loaded = ray.get(receiver.receive_files.remote(ray.put(ray.get(sender.files.remote())), manifest))
    seconds = time.perf_counter() - began
    assert loaded == sent
    ray.get(sender.withdraw.remote())
    return seconds


def main() -> None:
    if not ENVIRONMENT.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.publish_nodes"]
        subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT})
        return
    console = Console(width=120)
    console.print(machine())
    taken: dict[str, list[float]] = {name: [] for name in NAMES}
    with nodes_of(1, 0, _OBJECTS):
        own = ray.get_runtime_context().get_node_id()
        (other,) = (node["NodeID"] for node in ray.nodes() if node["NodeID"] != own)
        sender, receiver = _actor(Sender, own), _actor(Receiver, other)
        for turn in range(1 + REPEATS):  # the first is not counted
            for name in NAMES:
                seconds = publish(name, sender, receiver)
                if turn:
                    taken[name].append(seconds)
    table = Table("transport", "seconds, median", "of the folder's in the same turn", "least, most")
    figures = {}
    for name, of_each in taken.items():
        ratios = [own / folder for own, folder in zip(of_each, taken["folder"], strict=True)]
        median, of_folder = statistics.median(of_each), statistics.median(ratios)
        table.add_row(name, f"{median:.2f}", f"{of_folder:.2f}", f"{min(ratios):.2f}, {max(ratios):.2f}")
        figures[name] = {"seconds": median, "of_folder": of_folder}
    console.print(table)
    store_figures(figures)


if __name__ == "__main__":
    main()
