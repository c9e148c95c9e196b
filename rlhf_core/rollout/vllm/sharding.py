"""The shard of each published tensor that a layer of vLLM holds, if workers share its model by tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from rlhf_core.rollout.shards import Shard

_COLUMN_PARALLEL = (QKVParallelLinear, MergedColumnParallelLinear, ColumnParallelLinear)


def shards_of(layer: nn.Module, leaf: str, sizes: Sequence[tuple[int, ...]]) -> list[Shard] | None:
    """Return this worker's shard of each published tensor that `layer` is made of; None if the layout is unknown.

    leaf: `weight` or `bias`. sizes: the shapes of the published tensors, in the order in which they are fused.
    """
    whole = [Shard.whole(size[0]) for size in sizes]
    if not isinstance(layer, LinearBase | VocabParallelEmbedding) or layer.tp_size == 1:
        return whole
    # By the exact class, since one that is derived from it may divide its weights otherwise.
    kind, part = type(layer), cast(Any, layer)
    if isinstance(layer, ReplicatedLinear) or (kind is RowParallelLinear and leaf == "bias"):
        return whole
    if kind is RowParallelLinear:
        columns = _nth(part.input_size_per_partition, part.tp_rank)
        return [Shard(1, size[1], (columns,)) for size in sizes]
    if kind in (VocabParallelEmbedding, ParallelLMHead):
        indices = part.shard_indices
        return [Shard(0, size[0], ((indices.org_vocab_start_index, indices.org_vocab_end_index),)) for size in sizes]
    if kind in _COLUMN_PARALLEL:
        return _of_outputs(_outputs(part), [size[0] for size in sizes])
    return None


def factor_shard(layer: Any, index: int | None, factor: str, size: tuple[int, ...]) -> Shard | None:
    """Return this worker's shard of a LoRA factor of `layer`; None if the layout is unknown.

    index: of the adapted module in a layer that is fused from several; None: the layer is this module. factor: `lora_A`
    or `lora_B`; size: its shape.
    """
    kind = type(layer)
    if layer.tp_size == 1 or isinstance(layer, ReplicatedLinear):
        return Shard.whole(size[0])
    if kind is RowParallelLinear:
        columns = _nth(layer.input_size_per_partition, layer.tp_rank)
        return Shard.whole(size[0]) if factor == "lora_B" else Shard(1, size[1], (columns,))
    if kind in _COLUMN_PARALLEL:
        outputs = _outputs(layer)
        shards = _of_outputs(outputs if index is None else outputs[index : index + 1], [size[0]])
        if factor == "lora_A":
            return Shard.whole(size[0])
        return shards[0] if shards else None
    return None


def _outputs(layer: Any) -> list[tuple[int, tuple[int, int]]]:
    """Return the size of each output of a column-parallel layer, and the range of it that this worker computes."""
    if isinstance(layer, QKVParallelLinear):
        # With more workers than key-value heads, several hold the same heads.
        group = layer.tp_rank // layer.num_kv_head_replicas
        heads = layer.total_num_heads, layer.total_num_kv_heads
        return [
            (heads[0] * layer.head_size, _nth(layer.num_heads * layer.head_size, layer.tp_rank)),
            (heads[1] * layer.head_size, _nth(layer.num_kv_heads * layer.head_size, group)),
            (heads[1] * layer.v_head_size, _nth(layer.num_kv_heads * layer.v_head_size, group)),
        ]
    return [(rows * layer.tp_size, _nth(rows, layer.tp_rank)) for rows in layer.output_partition_sizes]


def _nth(length: int, index: int) -> tuple[int, int]:
    return index * length, (index + 1) * length


def _of_outputs(outputs: Sequence[tuple[int, tuple[int, int]]], rows: Sequence[int]) -> list[Shard] | None:
    """Return the shard of each published tensor of `rows`: each is one output, or one tensor is all of them."""
    sizes = [size for size, _ in outputs]
    if list(rows) == sizes:
        return [Shard(0, size, (held,)) for size, held in outputs]
    if list(rows) == [sum(sizes)]:
        offsets = accumulate(sizes, initial=0)
        held = tuple((first + start, first + stop) for first, (_, (start, stop)) in zip(offsets, outputs, strict=False))
        return [Shard(0, sum(sizes), held)]
    return None
