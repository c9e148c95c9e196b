"""Memory of a vLLM worker on CPU that holds nothing of use."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def empty_cache(kv_caches: Any) -> None:
    """Fills the key-value cache with zeros, as it was at the engine's start, by giving its pages back to the kernel.

    kv_caches: tensors, nested as vLLM has them. Nothing may be computed from what is in them. Raises OSError if the
    kernel refuses.
    """
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tree_leaves(kv_caches)
        if isinstance(tensor, Tensor)
    }
    libc = ctypes.CDLL(None, use_errno=True)
    for address, size in storages.items():
        # Whole pages only: the allocator's own notes are before the first, and others' data may be behind the last.
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED)
        ):
            number = ctypes.get_errno()
            raise OSError(number, f"the key-value cache was not emptied: {os.strerror(number)}")


def drop_packed_embeddings(model: nn.Module) -> None:
    """vLLM packs an embedding as if it multiplied with it, which only an output head does: a copy that nothing reads.

    Where the model has no head of its own, the embedding is the head, and keeps it.
    """
    layers = list(model.modules())
    if not any(isinstance(layer, ParallelLMHead) for layer in layers):
        return
    for layer in layers:
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # vLLM puts functions there too
