"""Weights by broadcast from rank 0 to all workers of all engines: over NCCL from GPU to GPU, over gloo between CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export its type

from rlhf_core.errors import StageError, reason_of
from rlhf_core.rollout.transport.base import (
    Offer,
    TransportError,
    WeightManifest,
    Weights,
    announced,
    own_rank,
    take_all,
)
from rlhf_core.system.network import interface_towards

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A Transport whose process group lives for one publish: rank 0, then the workers of each engine.

    It is independent of the groups of the ranks and of an engine's workers. If a process fails, it closes its end and
    the others fail too; if it hangs, they fail after `timeout_seconds`.
    """

    address: str  # host:port of the rendezvous store, on rank 0
    backend: Backend
    engines: int
    workers: int  # of one engine
    timeout_seconds: float = 600.0
    engine: int = 0  # index of the receiving engine

    @property
    def concurrent(self) -> bool:
        return True

    def send(self, weights: Weights, manifest: WeightManifest) -> None:
        if own_rank() != 0:
            take_all(weights)
            return
        with self._group(0, manifest.version) as group:
            for _, tensor in announced(weights, manifest):
                group.broadcast(tensor.detach().to(self._device).contiguous())
            group.meet()

    def receive(self, manifest: WeightManifest, worker: int = 0) -> Iterator[tuple[str, Tensor]]:
        with self._group(1 + self.engine * self.workers + worker, manifest.version) as group:
            for name, expected in manifest.layout.items():
                tensor = torch.empty(expected.shape, dtype=expected.dtype, device=self._device)
                group.broadcast(tensor)
                yield name, tensor
            group.meet()

    def for_engine(self, index: int) -> Collective:
        return replace(self, engine=index)

    def is_here(self) -> bool:
        return True

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")

    @contextmanager
    def _group(self, rank: int, version: int) -> Iterator[_Group]:
        group = _Group(self, rank, version)
        try:
            yield group
        except BaseException:
            group.close(abort=True)
            raise
        group.close()


class _Group:
    """The process group of one broadcast. Joining it waits for all processes."""

    def __init__(self, transport: Collective, rank: int, version: int) -> None:
        self._version, self._seconds = version, transport.timeout_seconds
        self._timeout, self._device = timedelta(seconds=transport.timeout_seconds), transport._device
        host, _, port = transport.address.rpartition(":")
        size = 1 + transport.engines * transport.workers
        make = _gloo_group if transport.backend == "gloo" else _nccl_group
        with self._explained():
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout)
            self._group: Any = make(store, rank, size, self._timeout, interface_towards(transport.address))

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast a contiguous tensor as bytes, which every backend supports."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if tensor.numel():
            with self._explained():
                self._group.broadcast([tensor.flatten().view(torch.uint8)], options).wait(self._timeout)

    def meet(self) -> None:
        """Wait until every process has received all tensors."""
        with self._explained():
            self._group.allreduce([torch.zeros(1, device=self._device)], dist.AllreduceOptions()).wait(self._timeout)

    def close(self, *, abort: bool = False) -> None:
        """Leave the group. Drops the only reference to it, since gloo closes connections with the last one."""
        group, self._group = self._group, None
        if abort:
            group.abort()
        else:
            group.shutdown()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # raised by torch: a lost connection, a timeout, NCCL
            raise TransportError(
                f"version {self._version} did not travel: another process of its broadcast has failed, or was not "
                f"there within {self._seconds:g} s ({reason_of(error)})"
            ) from error


def _gloo_group(store: Any, rank: int, size: int, timeout: timedelta, interface: str | None) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # By default gloo binds to the address of the host name, which other nodes may not reach.
    options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_default_device()]
    return gloo(store, rank, size, options)


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta, interface: str | None) -> Any:
    """Make an NCCL group. NCCL chooses its interfaces itself, or NCCL_SOCKET_IFNAME does."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)


@contextmanager
def offered(offer: Offer) -> Iterator[Collective]:
    """Yield the transport of a publish, and hold its rendezvous store until the end.

    Raises StageError if it is to go over NCCL, and this process has no GPU.
    """
    if offer.on_gpus and not torch.cuda.is_available():
        raise StageError("rollout.transport is collective, over NCCL, and this process has no GPU; set folder")
    store = offer.rendezvous()
    yield Collective(f"{store.host}:{store.port}", "nccl" if offer.on_gpus else "gloo", offer.engines, offer.workers)
