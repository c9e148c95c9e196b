"""What vLLM's workers learn from us: to load published weights whole, and to say which tensors they do not serve.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls it by `collective_rpc`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

_EMBEDDING = "model.embed_tokens.weight"
_COLUMNS = 8  # of each weight, over its whole breadth: every row has a say


class PublishedWeights:
    """Mixed into a vLLM worker: `reload_weights` and `model_runner` are the worker's."""

    def load_published(self, folder: str, repack_tied_head: bool) -> list[str]:
        """Every tensor of the safetensors files in `folder` replaces the one being served.

        Returns the names of those that this worker does not serve afterwards as they are in `folder`.
        """
        worker: Any = self
        worker.reload_weights(weights_iterator=_tensors(Path(folder)))
        model = worker.model_runner.get_model()
        if repack_tied_head and current_platform.is_cpu():
            _repack_heads(model)
        return _differing(model, dict(_tensors(Path(folder))))


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, opened.get_tensor(name)


def _repack_heads(model: nn.Module) -> None:
    """Packs the output head again from the weight it shares with the embedding.

    On CPU a head computes with a packed copy of its weight, made once after loading. A reload packs the layers that
    it loads a tensor for; a tied head has none, so it would go on serving the old weights without an error.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def _published_names(module: str, packed: Mapping[str, list[str]]) -> list[str]:
    """The published weights that make up the weight of `module`: several where vLLM fuses layers."""
    parent, _, leaf = module.rpartition(".")
    return [".".join(filter(None, (parent, part, "weight"))) for part in packed.get(leaf, [leaf])]


@torch.inference_mode()
def _differing(model: nn.Module, published: Mapping[str, Tensor]) -> list[str]:
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    differing: list[str] = []
    for module, layer in model.named_modules():
        names = _published_names(module, packed)
        label = names
        if isinstance(layer, ParallelLMHead) and names[0] not in published:  # a tied head has no tensor of its own
            names, label = [_EMBEDDING], [f"{names[0]} (tied to {_EMBEDDING})"]
        if all(name in published for name in names):
            weight = torch.cat([published[name] for name in names])
            if not _serves(layer, weight):
                differing += label
    return differing


def _serves(layer: nn.Module, weight: Tensor) -> bool:
    """True also where it cannot be told: layouts that we do not know, and layers split over GPUs."""
    served: Any = getattr(layer, "weight", None)
    if isinstance(layer, LinearBase | ParallelLMHead):
        return layer.tp_size > 1 or _computes_with(layer, weight, served)
    if served is None or served.shape[1:] != weight.shape[1:] or served.shape[0] < weight.shape[0]:
        return True
    return bool(torch.equal(served[: weight.shape[0]].cpu(), weight.to(served.dtype)))


def _computes_with(layer: nn.Module, weight: Tensor, served: Tensor) -> bool:
    """Asks the layer itself: on CPU the weight that it computes with is packed, and the plain one may be gone.

    The answer to an input of one 1 and else 0 is a column of the weight, to the bit: no other rounding happens, unless
    the GPU multiplies in TF32.
    """
    columns = torch.linspace(0, weight.shape[1] - 1, min(_COLUMNS, weight.shape[1])).long()
    probe = nn.functional.one_hot(columns, weight.shape[1]).to(device=served.device, dtype=served.dtype)
    method: Any = layer.quant_method
    answer = method.apply(layer, probe, None)[:, : weight.shape[0]].cpu()
    wanted = weight[:, columns].T.to(served.dtype)
    rounding = 2**-10 if served.is_cuda and served.dtype == torch.float32 else 0.0
    return bool(torch.allclose(answer, wanted, rtol=rounding, atol=0.0))
