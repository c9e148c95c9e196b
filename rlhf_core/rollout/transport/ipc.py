"""Weights by handle, from ranks to engines on the same machine and device: CUDA IPC on GPUs, shared memory on CPUs.

A sender writes all tensors, one after the other, into two buffers in turn, and fills a buffer again once every receiver
has copied it. Its socket carries the handles and the turns.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.rollout.transport.base import (
    Offer,
    TransportError,
    WeightManifest,
    Weights,
    announced,
    own_rank,
    take_all,
)
from rlhf_core.rollout.transport.local_socket import Connection, Listener
from rlhf_core.rollout.transport.shared_memory import (
    Device,
    Handle,
    SharedBuffer,
    current_device,
    identity,
    opened,
    synchronize,
)

_BUFFERS = 2  # one is filled while the other is copied
_listeners: dict[str, Listener] = {}  # of this process's offers, by address


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """A Transport between processes of one machine. A single sender serves all engines; of several each serves one of
    their workers, on its device.

    If a process fails, its sockets close and the others fail too; if it hangs, they fail after `timeout_seconds`.
    """

    name: str  # unique to this publish
    device: Device
    engines: int
    workers: int  # that receive, of one engine
    senders: int = 1  # ranks 0 ... senders - 1
    timeout_seconds: float = 600.0
    buffer_bytes: int = 64 * 2**20
    engine: int = 0  # index of the receiving engine

    @property
    def concurrent(self) -> bool:
        return True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Accept receivers inside the context, in which this process must call `send`."""
        address = self._address(own_rank())
        with closing(Listener(address, self.engines * self.workers)) as listener:
            _listeners[address] = listener
            try:
                yield
            finally:
                del _listeners[address]

    def send(self, weights: Weights, manifest: WeightManifest) -> None:
        if own_rank() >= self.senders:
            take_all(weights)
            return
        size = max(1, min(self.buffer_bytes, manifest.num_bytes))
        with ExitStack() as stack:
            buffers = [stack.enter_context(closing(SharedBuffer(size, self.device))) for _ in range(_BUFFERS)]
            receivers = self._join(stack, buffers, manifest.version)
            writer = _Writer([buffer.tensor for buffer in buffers], receivers, self.device)
            for _, tensor in announced(weights, manifest):
                writer.write(_content(tensor.detach().contiguous()))
            writer.finish()

    def receive(self, manifest: WeightManifest, worker: int = 0) -> Iterator[tuple[str, Tensor]]:
        device = current_device(self.device)
        with closing(self._connected(manifest.version, worker)) as sender:
            sender.tell(version=manifest.version, device=identity(self.device))
            told = [sender.hear(descriptors=1) for _ in range(_BUFFERS)]
            buffers = [opened(Handle(message["handle"], files), self.device) for message, files in told]
            reader = _Reader(buffers, sender, self.device)
            for name, expected in manifest.layout.items():
                tensor = torch.empty(expected.shape, dtype=expected.dtype, device=device)
                reader.read_into(_content(tensor))
                yield name, tensor
            reader.finish()

    def for_engine(self, index: int) -> SharedBuffers:
        return replace(self, engine=index)

    def is_here(self) -> bool:
        return True

    def _address(self, rank: int) -> str:
        return f"alignment-weights-{self.name}-{rank}"

    def _join(self, stack: ExitStack, buffers: Sequence[SharedBuffer], version: int) -> list[Connection]:
        """Wait for all receivers of this rank, and give them the handles."""
        listener = _listeners[self._address(own_rank())]
        deadline = time.monotonic() + self.timeout_seconds
        receivers: list[Connection] = []
        for _ in range(self.engines * self.workers // self.senders):
            receiver = stack.enter_context(closing(listener.accept(deadline, version, self.timeout_seconds)))
            receiver.require(version=version, device=identity(self.device))
            for handle in [buffer.handle() for buffer in buffers]:
                receiver.tell(handle.descriptors, handle=list(handle.fields))
            receivers.append(receiver)
        return receivers

    def _connected(self, version: int, worker: int) -> Connection:
        rank = self.engine * self.workers + worker if self.senders > 1 else 0
        try:
            return Connection.to(self._address(rank), version, self.timeout_seconds)
        except ConnectionRefusedError as error:
            raise TransportError(
                f"version {version} did not travel: rank {rank} does not offer it on the machine of engine "
                f"{self.engine}. It has failed, or rollout.transport is ipc and they are on different nodes, or in "
                "containers with networks of their own; set collective or folder"
            ) from error


class _Writer:
    """Writes bytes into the buffers in turn. A full buffer is `ready`; receivers answer that it is `copied`."""

    def __init__(self, buffers: Sequence[Tensor], receivers: Sequence[Connection], device: Device) -> None:
        self._buffers, self._receivers, self._device = buffers, receivers, device
        self._turn = 0  # of the buffer that is being filled: the number of those that were filled before
        self._used = 0  # bytes of it

    def write(self, content: Tensor) -> None:
        """content: uint8, one dimension."""
        while content.numel():
            if not self._used and self._turn >= _BUFFERS:
                self._wait_copied(self._turn - _BUFFERS)
            free = self._buffers[self._turn % _BUFFERS][self._used :]
            part, content = content[: free.numel()], content[free.numel() :]
            free[: part.numel()].copy_(part)
            self._used += part.numel()
            if part.numel() == free.numel():
                self._hand_over()

    def finish(self) -> None:
        """Hand over the rest, and wait until every receiver has copied everything."""
        if self._used:
            self._hand_over()
        for turn in range(max(0, self._turn - _BUFFERS), self._turn):
            self._wait_copied(turn)
        for receiver in self._receivers:
            receiver.require(received=self._turn)

    def _hand_over(self) -> None:
        synchronize(self._device)
        for receiver in self._receivers:
            receiver.tell(ready=self._turn)
        self._turn, self._used = self._turn + 1, 0

    def _wait_copied(self, turn: int) -> None:
        for receiver in self._receivers:
            receiver.require(copied=turn)


class _Reader:
    """Reads the bytes of a _Writer."""

    def __init__(self, buffers: Sequence[Tensor], sender: Connection, device: Device) -> None:
        self._buffers, self._sender, self._device = buffers, sender, device
        self._turn = -1  # of the buffer that is being copied
        self._unread = buffers[0][:0]  # the rest of it

    def read_into(self, content: Tensor) -> None:
        """content: uint8, one dimension."""
        while content.numel():
            if not self._unread.numel():
                self._next()
            part, content = content[: self._unread.numel()], content[self._unread.numel() :]
            part.copy_(self._unread[: part.numel()])
            self._unread = self._unread[part.numel() :]
            if not self._unread.numel():
                self._copied()

    def finish(self) -> None:
        """Tell the sender that everything is copied, and was used."""
        if self._unread.numel():
            self._copied()
        self._sender.tell(received=self._turn + 1)

    def _next(self) -> None:
        self._turn += 1
        self._sender.require(ready=self._turn)
        self._unread = self._buffers[self._turn % _BUFFERS]

    def _copied(self) -> None:
        synchronize(self._device)
        self._sender.tell(copied=self._turn)


def _content(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, (N,) uint8, in the same memory."""
    return tensor.flatten().view(torch.uint8)


@contextmanager
def offered(offer: Offer) -> Iterator[SharedBuffers]:
    """Yield the transport of a publish, whose sockets are closed at the end. Several senders are all ranks."""
    names = [secrets.token_hex(16)]
    if offer.senders > 1:
        dist.broadcast_object_list(names)
    device: Device = "cuda" if offer.on_gpus else "cpu"
    transport = SharedBuffers(names[0], device, offer.engines, offer.workers, offer.senders)
    with transport.listening():
        yield transport
