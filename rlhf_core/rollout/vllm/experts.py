"""The stacked experts of mixture-of-experts models in vLLM: reloading them on CPU, and reading each one back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from rlhf_core.rollout.shards import Shard

_PLAIN_BACKENDS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
_STACK = ".experts."
_DIGIT = 128  # integers up to it are exact in every weight dtype


def experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and layer of each stack of experts."""
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            yield name, layer


def choose_kernels_as_without_adapters() -> None:
    """Make vLLM choose the kernels of experts as if there were no adapters.

    With adapters, vLLM chooses Triton's kernel on CPU, where it does not run. Adapters never change experts
    (models.adapters.add_lora rejects that), so the kernel for models without adapters is correct.
    """
    module: Any = unquantized
    original = module.select_unquantized_moe_backend

    def select(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return original(moe_config)

    module.select_unquantized_moe_backend = select


def forget_kernels(model: nn.Module, unchanged: Iterable[str]) -> None:
    """Make vLLM pack the experts again at the next reload, as at its start, except for those of `unchanged` tensors.

    On CPU experts compute with packed weights, which vLLM packs when it builds their kernel. A reload does not rebuild
    an existing kernel, which would then read plain weights as packed ones without an error; it builds a missing one
    once weights of it are loaded.
    """
    kept = {name.rpartition(_STACK)[0] for name in unchanged if _STACK in name}
    for name, layer in experts_of(model):
        if name.rpartition(_STACK)[0] not in kept and isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
            layer.quant_method.moe_kernel = None


def expert_weights(
    name: str, layer: Any, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[list[str], list[Shard], Callable[[], Tensor]]]:
    """Yield the names of each expert's published tensors, this worker's shards of them, and a function that reads these
    stacked.

    shapes: of the published tensors. Yields nothing if workers share the experts one by one, or if these are quantised,
    or of an unknown layout.
    """
    parallel = layer.moe_config.moe_parallel_config
    if parallel.use_ep or not isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
        return
    if not layer.moe_config.is_act_and_mul or not _layout_is_known(layer):
        return
    width, rank = _width(layer), layer.moe_config.tp_rank
    held, total = (rank * width, (rank + 1) * width), width * parallel.tp_size
    parent = name.rpartition(".")[0]  # vLLM has the experts one level below the published module
    for expert in range(layer.local_num_experts):
        prefix = f"{parent}.{expert}."
        gate, up, down = (
            f"{prefix}{part}.weight"
            for part in (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        )
        if all(shapes.get(each, ())[:1] == (total,) for each in (gate, up)):
            yield [gate, up], [Shard(0, total, (held,))] * 2, partial(_gate_and_up, layer, expert)
        if shapes.get(down, ())[1:] == (total,):
            yield [down], [Shard(1, total, (held,))], partial(_down, layer, expert)


def _gate_and_up(layer: Any, expert: int) -> Tensor:
    width = _width(layer)
    weight = _plain(layer, layer.w13_weight[expert])
    padded = weight.shape[0] // 2
    return torch.cat([weight[:width], weight[padded : padded + width]])


def _down(layer: Any, expert: int) -> Tensor:
    return _plain(layer, layer.w2_weight[expert])[:, : _width(layer)]


def _width(layer: Any) -> int:
    """Return the width of this worker's share of an expert's hidden layer, which the engine may pad with zeros."""
    return int(layer.moe_config.intermediate_size_per_partition_unpadded)


def _layout_is_known(layer: Any) -> bool:
    method = layer.quant_method
    if method.unquantized_backend is not UnquantizedMoeBackend.CPU:
        return method.unquantized_backend in _PLAIN_BACKENDS
    weights = (layer.w13_weight[0], layer.w2_weight[0])
    return _packing(layer) is None or all(_packed_order(w.shape, w.dtype, _packing(layer)) is not None for w in weights)


def _packing(layer: Any) -> str | None:
    """Return the instruction set that the weights are packed for; None if they are not packed."""
    if layer.quant_method.unquantized_backend is not UnquantizedMoeBackend.CPU:
        return None
    experts = layer.quant_method.moe_kernel.fused_experts
    return None if experts._use_zentorch else str(experts.isa)


def _plain(layer: Any, served: Tensor) -> Tensor:
    """Return one expert's weight, (out, in), from the values that the kernel computes with."""
    packing = _packing(layer)
    if packing is None:
        return served
    order = _packed_order(served.shape, served.dtype, packing)
    assert order is not None
    plain = torch.empty_like(served).flatten()
    plain[order] = served.flatten()
    return plain.view(served.shape)


@lru_cache(maxsize=8)
def _packed_order(shape: torch.Size, dtype: torch.dtype, packing: str) -> Tensor | None:
    """Return the index in the plain weight of each packed element; None if packing is not a permutation.

    Determined by packing the indices themselves, digit by digit, so that it is valid for any kernel's layout.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers = torch.arange(shape.numel())
    order = torch.zeros_like(numbers)
    place = 1
    while place < len(numbers):
        digits = (numbers // place % _DIGIT).to(dtype).view(1, *shape)
        order += cpu_prepack_moe_weight(digits, packing).flatten().long() * place
        place *= _DIGIT
    return order if torch.equal(order.sort().values, numbers) else None
