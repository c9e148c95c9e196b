"""Finds what makes the host wait for a device, in programs on a CPU: batches and weights count as on the device.

A tensor is on the device if it was put there, or computed from one that is. A value of it that the host reads, or a
shape that depends on such values, waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from rlhf_core.types import PackedBatch

_READS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_OF_VALUES = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "unique_consecutive", "equal",
              "is_nonzero", "unique_dim"}  # fmt: skip


class DeviceReads:
    """The operations that waited, by name, in order."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._there = WeakTensorKeyDictionary()

    def put(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._there[tensor] = True

    def is_there(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor in self._there

    def batch(self, host: PackedBatch) -> PackedBatch:
        """`host.to(device)`"""
        moved = {f.name: value.clone() for f in fields(host) if isinstance(value := getattr(host, f.name), Tensor)}
        self.put(moved.values())
        result = replace(host, **moved)
        vars(result)["_on_host"] = host
        return result

    @contextmanager
    def watched(self) -> Iterator[None]:
        with _Calls(self), _Operators(self):
            yield


class _Calls(TorchFunctionMode):
    """Methods of tensors that read values; on a CPU they run no operator."""

    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _READS and args and self._reads.is_there(args[0]):
            self._reads.found.append(name)
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        there = any(self._reads.is_there(leaf) for leaf in tree_leaves((args, kwargs)))
        if there and (name in _OF_VALUES or _counts(name, args, kwargs)):
            self._reads.found.append(name)
        result = function(*args, **kwargs)
        if there:
            self._reads.put(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def _counts(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if the size of the result depends on values."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and isinstance(args[-1], Tensor)
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return False
