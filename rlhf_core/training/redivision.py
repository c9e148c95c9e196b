"""State of other ranks, or of another ZeRO stage, cut for this rank.

The tensors of a checkpoint and of this run have different shapes, but hold elements of the same parameters: those that
this rank needs are copied from the files of the ranks that had them. Weights, master weights and optimizer state are
equal to the bit. What follows is equal to rounding, since gradients are summed in another order.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_core.errors import StageError
from rlhf_core.training.state import Layout, Piece

_OPTIMIZER = "optimizer"  # the kind whose layout stands for several tensors: the moments of AdamW, its number of steps


@dataclass(frozen=True, slots=True)
class _Copy:
    """Elements `start` to `start + length` of a flattened tensor of `file`, which `target` has from `at` on."""

    file: str
    source: str
    start: int
    target: str
    at: int
    length: int


def without_layout(path: Path, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a file that its layout does not describe, such as counters and buffers."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if _key(name, layout) is None}  # noqa: SIM118


def same_weights(one: Layout, other: Layout) -> bool:
    """True if both have the same pieces in the same tensors, except of optimizer state, which there may not be yet."""
    weights = [{n: list(v) for n, v in each.items() if _part_and_kind(n)[1] != _OPTIMIZER} for each in (one, other)]
    return weights[0] == weights[1]


def layout_of(tensors: Iterable[str], layout: Layout) -> Layout:
    """Return the part of `layout` that describes `tensors`."""
    described = {_key(name, layout) for name in tensors}
    return {name: pieces for name, pieces in layout.items() if name in described}


def _key(name: str, layout: Layout) -> str | None:
    """Return the key of `layout` that describes a tensor: its own name, or that of an optimizer's state; else None."""
    return next((key for key in (name, name.rpartition(".")[0]) if key in layout), None)


def layout_json(layout: Layout) -> bytes:
    return json.dumps({name: [asdict(piece) for piece in pieces] for name, pieces in layout.items()}).encode()


def read_layout(text: bytes) -> Layout:
    return {name: [Piece(**piece) for piece in pieces] for name, pieces in json.loads(text).items()}


def redivided(
    live: Mapping[str, Tensor], layout: Layout, saved: Mapping[str, Layout], fetch: Callable[[str], Path]
) -> dict[str, Tensor]:
    """Return the tensors of `layout`, and those of the optimizer's state, from the files of a checkpoint.

    live: this run's tensors, whose shapes and dtypes the new ones have. saved: the layout of each file. fetch:
    download a file; those that have nothing for this rank are not. Raises StageError if an element is in none, or if
    other numbers of ranks share each weight.
    """
    ours, theirs = _shards(layout), max(map(_shards, saved.values()), default=1)
    if ours != theirs:
        raise StageError(
            f"the checkpoint was written with engine.tensor_parallel {theirs}, and this run has {ours}: set it back, "
            "or checkpoint.resume to false to start from scratch"
        )
    copies: defaultdict[str, list[_Copy]] = defaultdict(list)
    for copy in _copies(layout, saved):
        copies[copy.file].append(copy)
    tensors = {name: torch.zeros_like(live[name], device="cpu") for name in layout if name in live}
    for file, of_file in copies.items():
        with safe_open(fetch(file), framework="pt") as opened:
            for copy in of_file:
                _read(opened, copy, tensors, layout)
    return tensors


def _shards(layout: Layout) -> int:
    return max((piece.shards for pieces in layout.values() for piece in pieces), default=1)


def _copies(layout: Layout, saved: Mapping[str, Layout]) -> Iterator[_Copy]:
    # By the elements: those of a shard are in the files of all replicas.
    holders: defaultdict[tuple[str, str, str, int], dict[tuple[int, int], tuple[str, str, Piece]]] = defaultdict(dict)
    for file, sources in saved.items():
        for source, pieces in sources.items():
            for piece in pieces:
                held = holders[*_part_and_kind(source), piece.parameter, piece.shard]
                held.setdefault((piece.start, piece.length), (file, source, piece))
    kinds = {(part, kind) for part, kind, *_ in holders}
    for target, pieces in layout.items():
        part, kind = _part_and_kind(target)
        for piece in pieces:
            if (part, kind) not in kinds and kind == _OPTIMIZER:
                continue  # it has taken no step
            if (part, kind) not in kinds and kind == "master":
                kind = "weight"  # without ZeRO the optimizer steps the weights themselves
            held = holders.get((part, kind, piece.parameter, piece.shard), {})
            missing = piece.length
            for file, source, other in held.values():
                low = max(piece.start, other.start)
                length = min(piece.start + piece.length, other.start + other.length) - low
                if length > 0:
                    missing -= length
                    start, at = other.at + low - other.start, piece.at + low - piece.start
                    yield _Copy(file, source, start, target, at, length)
            if missing:
                raise StageError(
                    f"the checkpoint lacks {missing} numbers of {piece.parameter} ({kind}): it was written with other "
                    "settings; set them back, or set checkpoint.resume to false"
                )


def _read(file: Any, copy: _Copy, tensors: dict[str, Tensor], layout: Layout) -> None:
    if _part_and_kind(copy.source)[1] != _OPTIMIZER:
        _fill(tensors[copy.target], copy, _elements(file, copy.source, copy))
        return
    for source in file.keys():  # noqa: SIM118 (safe_open is no mapping)
        if not source.startswith(f"{copy.source}."):
            continue
        target = copy.target + source.removeprefix(copy.source)
        if not file.get_slice(source).get_shape():
            number = file.get_tensor(source)
            if not tensors.setdefault(target, number).equal(number):
                raise StageError(f"`{source}` differs between the ranks of the checkpoint, so it cannot be joined")
            continue
        elements = _elements(file, source, copy)
        if target not in tensors:
            tensors[target] = torch.zeros_like(_stepped(copy.target, tensors, layout), dtype=elements.dtype)
        _fill(tensors[target], copy, elements)


def _stepped(target: str, tensors: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """Return the tensor that the optimizer steps with the state `target`."""
    part, _ = _part_and_kind(target)
    master = target.replace(f"{part}.{_OPTIMIZER}", f"{part}.master", 1)
    (piece, *_) = layout[target]
    return tensors[master if master in tensors else f"{part}.weight.{piece.parameter}"]


def _elements(file: Any, name: str, copy: _Copy) -> Tensor:
    """Return what `copy` takes of a tensor; of a partition nothing else is read."""
    stored = file.get_slice(name)
    if len(stored.get_shape()) == 1:
        elements: Tensor = stored[copy.start : copy.start + copy.length]
        return elements
    whole: Tensor = file.get_tensor(name)
    return whole.flatten()[copy.start : copy.start + copy.length]


def _fill(tensor: Tensor, copy: _Copy, elements: Tensor) -> None:
    if elements.dtype != tensor.dtype:
        raise StageError(f"`{copy.source}` is {elements.dtype} in the checkpoint and {tensor.dtype} in this run")
    tensor.view(-1)[copy.at : copy.at + copy.length] = elements


def _part_and_kind(name: str) -> tuple[str, str]:
    """Return the part of a rank's state, as `policy`, and what of it: `weight`, `master` or `optimizer`."""
    part, kind, *_ = name.split(".")
    return part, kind
