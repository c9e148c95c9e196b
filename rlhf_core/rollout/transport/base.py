"""The interface of transports: a manifest that describes a publish, and the transport of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export its type

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.rollout.digest import tensor_digest

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Version, shapes, dtypes and digests of a publish."""

    version: int
    shapes: Mapping[str, tuple[int, ...]]  # by the name of each tensor, in the order in which they are sent
    dtypes: Mapping[str, torch.dtype]
    unchanged: frozenset[str] = frozenset()  # tensors that are not sent: engines have them since they started
    digests: Mapping[str, str] = field(default_factory=dict)  # as sent; empty before, since sending computes them

    @classmethod
    def of(cls, version: int, layout: Mapping[str, Tensor], unchanged: frozenset[str] = frozenset()) -> WeightManifest:
        """Describe `layout`, of which only shapes and dtypes are read. unchanged: names that are not sent."""
        sent = {name: tensor for name, tensor in layout.items() if name not in unchanged}
        shapes = {name: tuple(tensor.shape) for name, tensor in sent.items()}
        return cls(version, shapes, {name: tensor.dtype for name, tensor in sent.items()}, unchanged)

    def sent(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield those of `weights` that are sent."""
        return ((name, tensor) for name, tensor in weights if name not in self.unchanged)

    @property
    def layout(self) -> dict[str, Tensor]:
        """The tensors of the publish, without memory."""
        kinds = self.dtypes.items()
        return {name: torch.empty(self.shapes[name], dtype=dtype, device="meta") for name, dtype in kinds}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.layout.values())


@dataclass(frozen=True, slots=True)
class Offer:
    """A publish for which a transport is to be opened, on every rank that sends."""

    manifest: WeightManifest
    engines: int
    workers: int  # that receive, of one engine
    on_gpus: bool  # ranks and engines both have GPUs
    senders: int  # ranks 0 ... senders - 1 have an engine on their device; 1: rank 0 alone sends
    lora: LoraConfig | None  # of an adapter that is served as such
    rendezvous: Callable[[], TCPStore]  # starts a store on rank 0 that engines reach


class Transport(Protocol):
    """One publish from ranks to all workers of all engines. A picklable value, which each of these processes gets."""

    @property
    def concurrent(self) -> bool:
        """True if weights are received while they are sent; if not, after they were sent."""

    def send(self, weights: Weights, manifest: WeightManifest) -> None:
        """Send all `weights`. A collective call: every training rank must make it, also those that send nothing.

        Raises WeightSyncError unless they are the tensors of `manifest`.
        """

    def receive(self, manifest: WeightManifest, worker: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `manifest`, each in memory of its own. worker: index of this worker in its engine."""

    def for_engine(self, index: int) -> Transport:
        """Return the transport from which engine `index` receives."""

    def is_here(self) -> bool:
        """Return whether this process can receive; if not, the sent files must be copied to its node."""


class TransportError(WeightSyncError):
    """Raised when a process at the other end has failed or did not join in time; its own error has the cause."""


def digested(weights: Weights, digests: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`, and add the digest of each to `digests`, computed on the tensor's device."""
    for name, tensor in weights:
        digests[name] = tensor_digest(tensor)
        yield name, tensor


def announced(weights: Weights, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`. Raises WeightSyncError unless they are the tensors of `manifest`, in its order."""
    expected = iter(manifest.layout.items())
    for name, tensor in weights:
        kind, found = (name, tensor.dtype, tuple(tensor.shape)), next(expected, None)
        promised = None if found is None else (found[0], found[1].dtype, tuple(found[1].shape))
        if kind != promised:
            raise WeightSyncError(f"the weights have {kind} where {promised} was announced")
        yield name, tensor
    if (missing := next(expected, None)) is not None:
        raise WeightSyncError(f"the weights end before `{missing[0]}`, which was announced")


def own_rank() -> int:
    """Return the rank of this process, 0 in no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def take_all(weights: Weights) -> None:
    """Consume `weights` on a rank that sends nothing: gathering each is a collective call."""
    for _ in weights:
        pass
