"""The state that an engine's next step depends on, as named tensors.

The tensors are live: a checkpoint copies from them, and a resumed run copies into them in place, so that DeepSpeed's
views and buckets stay valid. Frozen weights, such as the base of a LoRA model, are not included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rlhf_core.errors import StageError


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a flattened parameter, and where a flattened tensor has them."""

    parameter: str
    start: int  # the first, in the parameter
    at: int  # its place in the tensor
    length: int
    shard: int = 0  # the part of a parameter that several ranks share, whose elements these are
    shards: int = 1  # how many such parts there are


# The pieces of parameters in a tensor by its name; those in all tensors `optimizer.3.…` by `optimizer.3`.
Layout = dict[str, Sequence[Piece]]


@dataclass(frozen=True)
class RankState:
    """Tensors of one rank by name. `shared`: equal on all ranks, so only rank 0's are saved.

    layout: of the tensors that are made of parameters, so that other numbers of ranks can resume from them.
    """

    shared: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)
    layout: Layout = field(default_factory=dict)


class Stateful(Protocol):
    """A part of a rank with state that the next step depends on."""

    def state(self) -> RankState:
        """Return references to the live tensors; non-tensor state is encoded as new tensors."""

    def load_state(self, state: RankState) -> None:
        """Load `state`, tensors on the CPU. Every rank must call it. Raises StageError if it does not fit."""


def copy_into(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy each tensor of `saved` into the one of the same name in `live`.

    Raises StageError unless names, shapes and dtypes are equal.
    """
    advice = "it was written with other settings; set them back, or set checkpoint.resume to false"
    for name in sorted(live.keys() ^ saved.keys()):
        where = "is in this run, but not in the checkpoint" if name in live else "is in the checkpoint, not in this run"
        raise StageError(f"`{name}` {where}: {advice}")
    for name, tensor in live.items():
        ours, theirs = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, saved[name]))
        if ours != theirs:
            raise StageError(f"`{name}` is {theirs} in the checkpoint and {ours} in this run: {advice}")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])
