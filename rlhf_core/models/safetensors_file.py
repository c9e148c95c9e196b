"""Safetensors files, read and written one tensor at a time.

What is written has the bytes of safetensors' own `save_file`, without a second copy in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_core.errors import StageError

# By name in a header, in the order in which safetensors lays out tensors: wide ones first, so that all are aligned.
DTYPES = {
    "I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = list(DTYPES)


def write_safetensors(files: Mapping[Path, Mapping[str, Tensor]], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write each tensor of `weights`, which may come in any order, to the file whose layout has its name.

    files: for each file the tensors that it will have; only their shapes and dtypes are read. A view of a gathered
    tensor is written before the next is taken. Raises StageError unless `weights` are exactly the tensors of `files`.
    """
    with ExitStack() as stack:
        missing: dict[str, tuple[BinaryIO, int, Tensor]] = {}
        for path, layout in files.items():
            file: BinaryIO = stack.enter_context(path.open("wb"))
            missing |= {name: (file, start, layout[name]) for name, start in _write_header(file, layout).items()}
        for name, tensor in weights:
            if name not in missing:
                raise StageError(f"the weights have a tensor `{name}` that was not announced, or twice")
            file, start, expected = missing.pop(name)
            if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                raise StageError(f"`{name}` is {_kind(tensor)}, but {_kind(expected)} was announced")
            file.seek(start)
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        if missing:
            raise StageError(f"the weights end without {len(missing)} tensors that were announced, as `{min(missing)}`")


def _write_header(file: BinaryIO, layout: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns where in `file` each tensor starts."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in sorted(layout, key=lambda each: (_ORDER.index(_NAMES[layout[each].dtype]), each)):
        tensor = layout[name]
        starts[name], end = end, end + tensor.numel() * tensor.element_size()
        dtype = _NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)
    return {name: 8 + len(text) + start for name, start in starts.items()}


def read_safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of the safetensors files of `folder`, by name."""
    return ((name, file.get_tensor(name)) for file, name in _opened(folder))


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the safetensors files of `folder`, from their headers alone."""
    return {name: tuple(file.get_slice(name).get_shape()) for file, name in _opened(folder)}


def read_layout(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of `folder` without memory, from headers alone: those of floating point in `dtype`."""
    layout = {}
    for file, name in _opened(folder):
        part = file.get_slice(name)
        stored: str = part.get_dtype()
        kind = dtype if stored.startswith(("F", "BF")) else DTYPES[stored]
        layout[name] = torch.empty(part.get_shape(), dtype=kind, device="meta")
    return layout


def _opened(folder: Path) -> Iterator[tuple[Any, str]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield file, name


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of its shape and dtype. (`empty_like` on another device imports torch's decompositions: seconds.)"""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
