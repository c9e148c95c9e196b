"""How weights travel from the training ranks to the engines: a manifest of what a publish is, and a transport of its
bytes."""

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
    """What a publish is, apart from its bytes."""

    version: int
    shapes: Mapping[str, tuple[int, ...]]  # by the name of each tensor, in the order in which they are sent
    dtypes: Mapping[str, torch.dtype]
    digests: Mapping[str, str] = field(default_factory=dict)  # as sent; empty before, since sending computes them

    @classmethod
    def of(cls, version: int, layout: Mapping[str, Tensor]) -> WeightManifest:
        """layout: only shapes and dtypes are read."""
        shapes = {name: tuple(tensor.shape) for name, tensor in layout.items()}
        return cls(version, shapes, {name: tensor.dtype for name, tensor in layout.items()})

    @property
    def layout(self) -> dict[str, Tensor]:
        """As tensors without memory."""
        kinds = self.dtypes.items()
        return {name: torch.empty(self.shapes[name], dtype=dtype, device="meta") for name, dtype in kinds}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.layout.values())


class Transport(Protocol):
    """One publish from rank 0 to all workers of all engines. Its value travels to each of these processes."""

    @property
    def concurrent(self) -> bool:
        """Whether weights are received while they are sent; if not, after they were sent."""

    def send(self, weights: Weights, manifest: WeightManifest) -> None:
        """Called on every training rank, each of which takes all `weights`.

        Raises WeightSyncError unless they are the tensors of `manifest`.
        """

    def receive(self, manifest: WeightManifest, worker: int = 0) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `manifest`, each in memory of its own. Called on every worker, by its number in the engine."""

    def for_engine(self, index: int) -> Transport:
        """As engine `index` is to receive."""

    def is_here(self) -> bool:
        """Whether this process can receive; if not, what was sent must be brought to its node."""


class TransportError(WeightSyncError):
    """A process at the other end has failed, or was not there in time: its own error, if there is one, says why."""


def digested(weights: Weights, digests: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """`weights`; of each that was taken `digests` has the digest, computed where the tensor is."""
    for name, tensor in weights:
        digests[name] = tensor_digest(tensor)
        yield name, tensor


def is_first_rank() -> bool:
    """Also a process that is no rank."""
    return not dist.is_initialized() or dist.get_rank() == 0


def take_all(weights: Weights) -> None:
    """What the other ranks do with weights: gathering each is a call that all of them make."""
    for _ in weights:
        pass
