"""The process group of the training ranks, and the environment that DeepSpeed reads."""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore  # the types of torch.distributed do not export them

from rlhf_core.mesh import Mesh, current_mesh, join_mesh
from rlhf_core.system.network import interface_towards

TIMEOUT = timedelta(minutes=30)
_host = "127.0.0.1"  # where the ranks meet


def host_store(host: str, port: int = 0) -> TCPStore:
    """The store where the ranks of a group meet, which listens at `host` alone; `port` 0: at one that is free.

    It holds the port from here on: one that is only looked up may be another process's when the ranks meet. Whoever
    keeps it must outlive the group. Raises OSError if nothing can listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listening.detach()
        )


def join_group(*, rank: int, size: int, address: str = "", sequence: int = 1, tensor: int = 1) -> Mesh:
    """Join the group of `size` ranks that meets at `address` (host:port of its store; a group of one needs none).

    sequence, tensor: sizes of the mesh; a replica is as many ranks as their product.

    gloo on CPUs, nccl on GPUs. Every rank is a process of its own that sees one GPU at most. Joining again as the same
    rank is a no-op; as another one it raises RuntimeError. The process leaves the group when it exits.
    """
    if dist.is_initialized():
        mesh = current_mesh()
        if (mesh.rank, mesh.size, mesh.sequence, mesh.tensor) != (rank, size, sequence, tensor):
            raise RuntimeError(
                f"this process is rank {mesh.rank} of {mesh.size} already, in a mesh of data {mesh.data} x sequence "
                f"{mesh.sequence} x tensor {mesh.tensor}"
            )
        return mesh
    _set_environment(rank=rank, size=size)
    if address:
        global _host
        _host = address.rpartition(":")[0]
    if address and (interface := interface_towards(address)):
        # Otherwise gloo binds to whatever the host's name resolves to, which other nodes may not reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        backend = "nccl"
    store: Store = HashStore()
    if size > 1:
        host, _, port = address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    # gloo's threads, if they outlive the interpreter, now and then abort a process that has done all its work.
    atexit.register(_leave_group)
    return join_mesh(sequence=sequence, tensor=tensor, timeout=TIMEOUT)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def own_host() -> str:
    """The host by which other nodes know this rank's, if it is rank 0."""
    return _host


def _set_environment(*, rank: int, size: int) -> None:
    """DeepSpeed reads these before it looks for MPI; LOCAL_SIZE is its CPU device count."""
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    os.environ.update({name: str(value) for name, value in values.items()})
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
