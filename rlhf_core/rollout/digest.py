"""Digests of tensors, computed on their device: equal on all devices, and only hashes are transferred."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor
from torch.nn import functional as F

from rlhf_core.rollout import xxh3

_LEAF = xxh3.LENGTH  # bytes per hash
_LEAVES = 64  # per block on CPUs, which then stays in a core's cache
_LEAVES_ON_DEVICES = 8192  # few, large kernels; they need a few times 128 MiB of memory


def tensor_digest(tensor: Tensor) -> str:
    """Return a digest of 128 bits of dtype, shape and values, which depends on every element and its position.

    XXH3 of dtype, shape, and the XXH3 of each leaf of 16 KiB, the last padded with zeros. Subnormal numbers and -0
    count as 0: matrix products, by which an engine's packed weights are read back, preserve neither.
    """
    digest = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    values = tensor.detach().contiguous().flatten()
    leaves, hashes = (_LEAVES, _on_cpu) if values.is_cpu else (_LEAVES_ON_DEVICES, _on_device)
    for block in values.split(leaves * _LEAF // values.element_size()):
        digest.update(hashes(_content(block)))
    return digest.hexdigest()


def _content(values: Tensor) -> Tensor:
    """Return a copy of the bytes of `values`, uint8, padded to whole leaves."""
    floating = values.is_floating_point()
    copied = F.hardshrink(values, torch.finfo(values.dtype).tiny) if floating else values.clone()
    content = copied.view(torch.uint8)
    padding = -content.numel() % _LEAF
    return F.pad(content, (0, padding)) if padding else content


def _on_cpu(content: Tensor) -> bytes:
    """Hash by the library, which is several times faster on CPUs than tensor arithmetic."""
    memory = content.numpy().data
    leaves = range(0, len(memory), _LEAF)
    return b"".join(xxhash.xxh3_64_intdigest(memory[i : i + _LEAF]).to_bytes(8, "little") for i in leaves)


def _on_device(content: Tensor) -> bytes:
    return xxh3.hashes(content.view(torch.int64).view(-1, _LEAF // 8)).cpu().numpy().tobytes()
