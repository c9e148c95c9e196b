"""Merging of several models of one shape, tensor by tensor: in float64, stored in the dtype of the first."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_core.errors import StageError
from rlhf_core.models.folders.headers import WEIGHTS_INDEX, stored_tensors, weight_files
from rlhf_core.models.safetensors_file import DTYPES, write_safetensors

# One tensor of the first model and those of the others, in float64 -> that of the result.
Mix = Callable[[Tensor, Sequence[Tensor]], Tensor]

_PARALLEL = 1e-6  # radians between two tensors: the arc is a line to the last digit


def linear(first: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """W + sum_i w_i (W_i - W), arXiv:2203.05482. All tensors have one shape, as in all functions here."""
    result = first.clone()
    for other, weight in zip(others, weights, strict=True):
        result += weight * (other - first)
    return result


def slerp(first: Tensor, other: Tensor, share: float) -> Tensor:
    """Return the tensor at `share` (0 to 1) of the angle from one to the other, as vectors; its length is interpolated
    linearly.

    Raises StageError if they point in opposite directions, between which there is no arc.
    """
    lengths = first.norm().item(), other.norm().item()
    if min(lengths) == 0:
        return linear(first, [other], [share])
    units = first / lengths[0], other / lengths[1]
    # For small angles the cosine is not accurate.
    angle = 2 * math.atan2((units[1] - units[0]).norm().item(), (units[1] + units[0]).norm().item())
    if angle < _PARALLEL:
        return linear(first, [other], [share])
    if angle > math.pi - _PARALLEL:
        raise StageError("two weights are opposite to each other, so there is no arc between them: use linear")
    length = (1 - share) * lengths[0] + share * lengths[1]
    one, two = math.sin((1 - share) * angle), math.sin(share * angle)
    result: Tensor = (one * units[0] + two * units[1]) * (length / math.sin(angle))
    return result


def ties(first: Tensor, others: Sequence[Tensor], weights: Sequence[float], *, density: float, scale: float) -> Tensor:
    """Trim, elect sign, merge: section 4 of arXiv:2306.01708. density: share of a change's entries that are kept."""
    changes = torch.stack([_trimmed(other - first, density) for other in others])
    weight = torch.tensor(weights, dtype=changes.dtype).view(-1, *[1] * first.dim())
    weighted = weight * changes
    agrees = (changes.sign() == weighted.sum(0).sign()) & (changes != 0)
    total = (weight * agrees).sum(0)
    return first + scale * torch.where(total > 0, (weighted * agrees).sum(0) / total.clamp(min=1e-300), 0.0)


def _trimmed(change: Tensor, density: float) -> Tensor:
    """Return the change with all but its largest entries 0; of equal ones all are kept."""
    kept = math.ceil(density * change.numel())
    if kept == change.numel():
        return change
    smallest = change.abs().flatten().kthvalue(change.numel() - kept + 1).values
    return torch.where(change.abs() >= smallest, change, 0.0)


def mix_models(folder: Path, others: Sequence[Path], mix: Mix, out_folder: Path) -> None:
    """Write the weights of `folder`, mixed with those of `others`, in its shards and dtypes: one tensor in memory.

    Raises StageError if the models do not have the same tensors, or a result is not finite.
    """
    _require_same_tensors(folder, others)
    with ExitStack() as stack:
        given, *opened = (_opened(stack, each) for each in (folder, *others))
        files = defaultdict[Path, dict[str, Tensor]](dict)
        for key, stored in stored_tensors(folder).items():
            files[out_folder / stored.file][key] = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")
        write_safetensors(
            files,
            (
                (key, _mixed(key, file.get_tensor(key), [tensors[key].get_tensor(key) for tensors in opened], mix))
                for key, file in given.items()
            ),
        )
    for name in ("config.json", WEIGHTS_INDEX):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out_folder / name)


def _opened(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """Return the open file of each tensor."""
    # By default safetensors maps files into memory, where all that was read stays.
    files = [stack.enter_context(safe_open(folder / name, "pt", backend="pread")) for name in weight_files(folder)]
    return {key: file for file in files for key in file.keys()}  # noqa: SIM118 (it is no mapping)


def _mixed(name: str, first: Tensor, others: Sequence[Tensor], mix: Mix) -> Tensor:
    if not first.is_floating_point():
        if any(not torch.equal(first, other) for other in others):
            raise StageError(f"{name} holds whole numbers, which differ between the models: they cannot be merged")
        return first
    result = mix(first.double(), [other.double() for other in others]).to(first.dtype)
    if not bool(torch.isfinite(result).all()):
        raise StageError(f"the merged {name} holds NaN, or numbers too large for {first.dtype}: lower the weights")
    return result


def _require_same_tensors(folder: Path, others: Sequence[Path]) -> None:
    first_shapes = {name: tensor.shape for name, tensor in stored_tensors(folder).items()}
    for place, other in enumerate(others):
        other_shapes = {name: tensor.shape for name, tensor in stored_tensors(other).items()}
        for name in sorted(first_shapes.keys() | other_shapes.keys()):
            if first_shapes.get(name) != other_shapes.get(name):
                shown = [_shown(shapes.get(name)) for shapes in (first_shapes, other_shapes)]
                raise StageError(
                    f"others.{place}.model: {name} {shown[1]} there and {shown[0]} in `model`: only models of one "
                    "architecture and size can be merged"
                )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "does not exist" if shape is None else f"has the shape {list(shape)}"
