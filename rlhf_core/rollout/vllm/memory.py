"""Release of unused memory of a vLLM worker on CPU."""

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
    """Fill the key-value cache with zeros, as at the engine's start, by returning its pages to the kernel.

    kv_caches: tensors, nested as in vLLM, whose content must not be used any more. Raises OSError if the kernel
    refuses.
    """
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tree_leaves(kv_caches)
        if isinstance(tensor, Tensor)
    }
    libc = ctypes.CDLL(None, use_errno=True)
    for address, size in storages.items():
        # Whole pages only: the allocator's metadata precedes the first, and other data may follow the last.
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED)
        ):
            number = ctypes.get_errno()
            raise OSError(number, f"the key-value cache was not emptied: {os.strerror(number)}")


def drop_packed_embeddings(model: nn.Module) -> None:
    """Drop the packed copy of an embedding, which vLLM makes for matrix products that only an output head needs.

    In a model without a head of its own, the embedding is the head, and the copy stays.
    """
    layers = list(model.modules())
    if not any(isinstance(layer, ParallelLMHead) for layer in layers):
        return
    for layer in layers:
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # vLLM assigns functions, too
