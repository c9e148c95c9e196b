"""Read-back of the tensors that a vLLM worker computes with, by the names under which they were published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.shards import Shard
from rlhf_core.rollout.vllm.experts import expert_weights, experts_of
from rlhf_core.rollout.vllm.sharding import factor_shard, shards_of

Shapes = Mapping[str, tuple[int, ...]]

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.text_model.embed_tokens.weight")
_COLUMNS = 512  # of a packed weight that are read back at once


@dataclass(frozen=True, slots=True)
class ServedLayer:
    """The weight or bias of one layer, which vLLM may have fused from several published tensors."""

    names: list[str]  # in the engine
    published: list[str]  # the published tensors that they should equal
    shards: list[Shard]  # of these, which this worker holds
    rows: list[int]  # of each shard
    read: Callable[[], Tensor]  # (all rows, ...): the values in use
    read_columns: Callable[[Tensor], Tensor] | None = None  # of a packed weight, which is expensive to read in full

    def tensors(self) -> Iterator[tuple[str, str, Shard, Tensor]]:
        """Yield (name in the engine, published name, shard, values)."""
        yield from zip(self.names, self.published, self.shards, self.read().split(self.rows), strict=True)

    def digest_columns(self, columns: Tensor, dtype: torch.dtype) -> list[str]:
        """Return the digest of these columns of the shard of each published tensor, as served."""
        assert self.read_columns is not None
        return [tensor_digest(part.to(dtype)) for part in self.read_columns(columns).split(self.rows)]


def served_layers(model: nn.Module, shapes: Shapes, *, tied: bool) -> Iterator[ServedLayer]:
    """Yield every weight and bias of `model` whose layout can be read, without padding of the vocabulary.

    shapes: of the published tensors. tied: the output head has no published tensor of its own.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    embedding = next((name for name in _EMBEDDINGS if name in shapes), _EMBEDDINGS[0])
    for module, layer in model.named_modules():
        for leaf in ("weight", "bias"):
            names = [f"{part}.{leaf}" for part in _parts(module, packed)]
            published = [embedding] if tied and names == [_HEAD] else names
            if all(name in shapes for name in published):
                sizes = [shapes[name] for name in published]
                shards = shards_of(layer, leaf, sizes)
                if shards is None:
                    continue
                rows = [s.length if s.axis == 0 else size[0] for s, size in zip(shards, sizes, strict=True)]
                if leaf == "weight" and _is_packed(layer):
                    read_columns = partial(_computed_with, layer, sum(rows))
                    yield ServedLayer(names, published, shards, rows, read_columns, read_columns)
                elif (read := _reader(layer, leaf, sum(rows))) is not None:
                    yield ServedLayer(names, published, shards, rows, read)
    for module, layer in experts_of(model):
        for names, shards, read in expert_weights(module, layer, shapes):
            rows = [s.length if s.axis == 0 else shapes[n][0] for n, s in zip(names, shards, strict=True)]
            yield ServedLayer(names, names, shards, rows, read)


def _parts(module: str, packed: Mapping[str, list[str]]) -> list[str]:
    """Return the published modules that make up `module`; several if vLLM fuses layers."""
    parent, _, leaf = module.rpartition(".")
    return [".".join(filter(None, (parent, part))) for part in packed.get(leaf, [leaf])]


def _reader(layer: nn.Module, leaf: str, rows: int) -> Callable[[], Tensor] | None:
    """Return a function that reads this worker's shard of the layer; None if it is quantised or has fewer rows."""
    if leaf == "weight" and isinstance(layer, LinearBase | VocabParallelEmbedding) and not _is_plain(layer):
        return None
    values: Any = getattr(layer, leaf, None)
    if not isinstance(values, Tensor) or values.ndim == 0 or values.shape[0] < rows:
        return None
    return lambda: values[:rows]


def _is_plain(layer: LinearBase | VocabParallelEmbedding) -> bool:
    """Return whether the layer is not quantised."""
    return isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)


def _is_packed(layer: nn.Module) -> bool:
    return isinstance(layer, LinearBase | ParallelLMHead) and current_platform.is_cpu() and _is_plain(layer)


@torch.inference_mode()
def _computed_with(layer: Any, rows: int, columns: Tensor | None = None) -> Tensor:
    """Return the weight, (rows, columns), from outputs of the layer; columns None: all.

    On CPU the layer computes with a packed copy, and the plain weight may be freed. The output for a one-hot input is a
    column of the weight to the bit: nothing is rounded.
    """
    if isinstance(layer, LinearBase):
        width, dtype = getattr(layer, "input_size_per_partition", layer.input_size), layer.params_dtype
    else:
        width, dtype = layer.embedding_dim, layer.weight.dtype
    one_hot = torch.eye(width, dtype=dtype)
    selected = one_hot if columns is None else one_hot[columns]
    return torch.cat([layer.quant_method.apply(layer, inputs, None) for inputs in selected.split(_COLUMNS)]).T[:rows]


@torch.inference_mode()
def served_adapter(
    worker: Any, given: Mapping[str, Tensor], scaling: float
) -> Iterator[tuple[str, Shard, Tensor | None]]:
    """Yield each LoRA factor of `given` with this worker's shard of it, as in the active adapter; None if it is missing
    or of an unknown layout.

    scaling: vLLM multiplies it into `lora_B`. A factor whose served values match is returned as given.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    (slot,) = [index for index, adapter in enumerate(manager.lora_index_to_id) if adapter is not None]
    packed: Mapping[str, list[str]] = manager.packed_modules_mapping
    for name, values in given.items():
        module, factor, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
        layer, index = _adapted(manager.modules, module, packed)
        shard = None if layer is None else factor_shard(layer.base_layer, index, factor, values.shape)
        if layer is None or shard is None:
            yield name, Shard.whole(values.shape[0]), None
            continue
        stacked = (layer.lora_a_stacked if factor == "lora_A" else layer.lora_b_stacked)[index or 0]
        held = shard.of(values)
        served = stacked[slot, 0, : held.shape[0], : held.shape[1]]
        expected = held.to(served.dtype) * (1.0 if factor == "lora_A" else scaling)
        yield name, shard, values if torch.equal(served.cpu(), expected) else served


def _adapted(modules: Mapping[str, Any], module: str, packed: Mapping[str, list[str]]) -> tuple[Any, int | None]:
    """Return the layer that serves the adapter of `module`, or None, and the index of `module` in a fused layer."""
    if module in modules:
        return modules[module], None
    parent, _, leaf = module.rpartition(".")
    for fused, parts in packed.items():
        if leaf in parts and (layer := modules.get(".".join(filter(None, (parent, fused))))) is not None:
            return layer, parts.index(leaf)
    return None, None
