"""The interface of transports: a manifest that describes a publish, and the transport of its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

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


class Transport(Protocol):
    """One publish from rank 0 to all workers of all engines. A picklable value, which each of these processes gets."""

    @property
    def concurrent(self) -> bool:
        """Whether weights are received while they are sent; if not, after they were sent."""

    def send(self, weights: Weights, manifest: WeightManifest) -> None:
        """Send all `weights`. A collective call: every training rank must make it.

        Raises WeightSyncError unless they are the tensors of `manifest`.
        """

    def receive(self, manifest: WeightManifest, worker: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `manifest`, each in memory of its own. worker: index of this worker in its engine."""

    def for_engine(self, index: int) -> Transport:
        """Return the transport from which engine `index` receives."""

    def is_here(self) -> bool:
        """Whether this process can receive; if not, the sent files must be copied to its node."""


class TransportError(WeightSyncError):
    """Raised when a process at the other end has failed or did not join in time; its own error has the cause."""


def digested(weights: Weights, digests: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`, and add the digest of each to `digests`, computed on the tensor's device."""
    for name, tensor in weights:
        digests[name] = tensor_digest(tensor)
        yield name, tensor


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or in no process group."""
    return not dist.is_initialized() or dist.get_rank() == 0


def take_all(weights: Weights) -> None:
    """Consume `weights` on a rank that sends nothing: gathering each is a collective call."""
    for _ in weights:
        pass
