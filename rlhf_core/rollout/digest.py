"""A digest of a tensor, computed where it is: equal on all devices, and only hashes leave a device."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor
from torch.nn import functional as F

from rlhf_core.rollout import xxh3

_LEAF = xxh3.LENGTH  # bytes that one hash stands for
_LEAVES = 64  # at once on CPUs: they stay in a core's cache
_LEAVES_ON_DEVICES = 8192  # few, large kernels; they take a few times 128 MiB of memory


def tensor_digest(tensor: Tensor) -> str:
    """128 bits of dtype, shape and values: one element changed, or two exchanged, give another digest.

    XXH3 of dtype, shape, and the XXH3 of each leaf of 16 KiB, the last filled up with zeros. Values too small to be
    normal numbers count as 0, and -0 does: matrix products, by which an engine's packed weights are read back, keep
    neither.
    """
    digest = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    values = tensor.detach().contiguous().flatten()
    leaves, hashes = (_LEAVES, _on_cpu) if values.is_cpu else (_LEAVES_ON_DEVICES, _on_device)
    for block in values.split(leaves * _LEAF // values.element_size()):
        digest.update(hashes(_content(block)))
    return digest.hexdigest()


def _content(values: Tensor) -> Tensor:
    """(whole leaves,) uint8: the bits of `values`, in memory of their own."""
    floating = values.is_floating_point()
    fresh = F.hardshrink(values, torch.finfo(values.dtype).tiny) if floating else values.clone()
    content = fresh.view(torch.uint8)
    missing = -content.numel() % _LEAF
    return F.pad(content, (0, missing)) if missing else content


def _on_cpu(content: Tensor) -> bytes:
    """By the library, which is several times faster there than arithmetic of tensors."""
    memory = content.numpy().data
    leaves = range(0, len(memory), _LEAF)
    return b"".join(xxhash.xxh3_64_intdigest(memory[i : i + _LEAF]).to_bytes(8, "little") for i in leaves)


def _on_device(content: Tensor) -> bytes:
    return xxh3.hashes(content.view(torch.int64).view(-1, _LEAF // 8)).cpu().numpy().tobytes()
