"""Muon for the matrices of the hidden layers, AdamW for everything else, as one optimizer that ZeRO can shard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.config.stages.trained import MuonConfig
from rlhf_core.mesh import current_mesh

# The quintic of Jordan et al., Muon (2024): steepest at zero, so that small singular values grow fastest.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Approximate U V^T of the matrix U S V^T, (A, B), by `steps` Newton-Schulz iterations in `dtype`.

    The iteration starts at matrix / norm. Singular values end up between about 0.7 and 1.2, not at 1; a zero matrix
    stays zero. In bfloat16 each sum is rounded once (`addmm`), as in torch.optim.Muon: rounding the products too would
    double the error.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if tall else matrix
    x = (x / x.norm().clamp(min=1e-7)).to(dtype)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


def update_scale(shape: Sequence[int], kind: Literal["match_rms_adamw", "original"]) -> float:
    """Return the factor of an orthogonal update of (A, B): arXiv:2502.16982 eq. 4, or Jordan et al., 2024."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if kind == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


@dataclass(frozen=True, slots=True)
class WholeMatrix:
    """A matrix in the partitions of ZeRO 1 and 2, which split one flat vector: its elements from `start` on."""

    start: int
    shape: torch.Size

    def read(self, partitions: Tensor) -> Tensor:
        """Return the matrix. partitions: (ranks, n), the partition of each rank."""
        return partitions.view(-1)[self.start : self.start + self.shape.numel()].view(self.shape)

    def write(self, partitions: Tensor, matrix: Tensor) -> None:
        self.read(partitions).copy_(matrix)


@dataclass(frozen=True, slots=True)
class CutMatrix:
    """A matrix in the partitions of ZeRO 3, which splits each matrix: every rank has `length` elements at `start`."""

    start: int
    length: int
    shape: torch.Size

    def read(self, partitions: Tensor) -> Tensor:
        """Return the matrix. partitions: (ranks, n), the partition of each rank."""
        pieces = partitions[:, self.start : self.start + self.length]
        return pieces.reshape(-1)[: self.shape.numel()].view(self.shape)

    def write(self, partitions: Tensor, matrix: Tensor) -> None:
        pieces = partitions[:, self.start : self.start + self.length]
        padded = matrix.new_zeros(pieces.shape)
        padded.view(-1)[: matrix.numel()] = matrix.reshape(-1)
        pieces.copy_(padded)


Layout = Sequence[WholeMatrix | CutMatrix]


class Muon(torch.optim.AdamW):
    """Muon (arXiv:2502.16982, algorithm 1) for groups with `muon` true, AdamW for the others.

    The momentum is the state `momentum_buffer` of each parameter. A group's parameters are matrices or, under ZeRO, one
    vector with this rank's partition of them, whose layout is in `layouts` by the group's `index`. The ranks then
    gather the update directions, orthogonalise a share of the matrices each, and all-reduce the updates.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: MuonConfig,
        *,
        betas: tuple[float, float],
        epsilon: float = 1e-8,
        dtype: torch.dtype,
    ) -> None:
        """groups: with `muon`, `index`, `lr` and `weight_decay`. betas, epsilon: of AdamW. dtype: of the Newton-Schulz
        iterations.
        """
        super().__init__(groups, betas=betas, eps=epsilon)
        self.layouts: Mapping[int, Layout] = {}
        self._config = config
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all groups; parameters without a gradient are skipped."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._step_matrix(parameter, group)

    def _step_matrix(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Update a matrix, or a partition of matrices: everything but the orthogonalisation is element-wise."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # unused here, but AdamW reads it when a state is loaded
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["step"] += 1
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(parameter.grad, 1 - self._config.momentum)
        direction = parameter.grad.lerp(momentum, self._config.momentum) if self._config.nesterov else momentum
        update = self._update(direction) if direction.ndim == 2 else self._exchange(direction, group["index"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _update(self, direction: Tensor) -> Tensor:
        scale = update_scale(direction.shape, self._config.scale)
        return orthogonalize(direction, self._config.ns_steps, self._dtype) * scale

    def _exchange(self, direction: Tensor, group_index: int) -> Tensor:
        """Return this rank's partition (n,) of the updates, given its partition of the directions.

        Runs on the device even if the optimizer's state is in host memory: NCCL cannot send from there, and a GPU
        multiplies the matrices in a fraction of the time.
        """
        mesh = current_mesh()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        partitions = direction.new_empty(mesh.size, direction.numel(), device=device)
        dist.all_gather_into_tensor(partitions.view(-1), direction.to(device))
        updates = torch.zeros_like(partitions)
        for matrix in self.layouts[group_index][mesh.rank :: mesh.size]:
            matrix.write(updates, self._update(matrix.read(partitions)))
        mesh.reduce(updates, over="all")
        return updates[mesh.rank].to(direction.device)
