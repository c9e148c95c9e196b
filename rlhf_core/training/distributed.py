"""The process group of the training ranks, and the environment that DeepSpeed reads."""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore  # torch.distributed does not export their types

from rlhf_core.mesh import Mesh, current_mesh, join_mesh
from rlhf_core.system.network import interface_towards

TIMEOUT = timedelta(minutes=30)
_host = "127.0.0.1"  # of the store of this process's group


def host_store(host: str, port: int = 0) -> TCPStore:
    """Start the rendezvous store of a process group, which listens on `host` only. port 0: any free port.

    The port is bound immediately, since another process could take one that is merely looked up. The store must
    outlive the group. Raises OSError if the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listening.detach()
        )


def join_group(
    *, rank: int, size: int, address: str = "", sequence: int = 1, tensor: int = 1, timeout: timedelta = TIMEOUT
) -> Mesh:
    """Join the process group of `size` ranks whose store is at `address` (host:port; unused for one rank).

    sequence, tensor: sizes of the mesh; a replica has sequence * tensor ranks. timeout: of a collective operation.

    The backend is gloo on CPUs and NCCL on GPUs. Every rank is a process that sees at most one GPU. Joining again as
    the same rank is a no-op; as another one it raises RuntimeError. The process leaves the group at exit.
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
        # By default gloo binds to the address of the host name, which other nodes may not reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        backend = "nccl"
    store: Store = HashStore()
    if size > 1:
        host, _, port = address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    # gloo's threads occasionally abort a finished process if they outlive the interpreter.
    atexit.register(_leave_group)
    return join_mesh(sequence=sequence, tensor=tensor, timeout=timeout)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def own_host() -> str:
    """Return the host at which other nodes reach rank 0."""
    return _host


def _set_environment(*, rank: int, size: int) -> None:
    """Set the variables that DeepSpeed reads before it tries MPI; LOCAL_SIZE is its CPU device count."""
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    os.environ.update({name: str(value) for name, value in values.items()})
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
