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

_PROBE_ROWS = 4


class PublishedWeights:
    """Mixed into a vLLM worker: `reload_weights`, `model_runner` and `vllm_config` are the worker's."""

    def load_published(self, folder: str, repack_tied_head: bool) -> None:
        """Every tensor of the safetensors files in `folder` replaces the one being served."""
        worker: Any = self
        worker.reload_weights(weights_iterator=_tensors(Path(folder)))
        if repack_tied_head and current_platform.is_cpu():
            _repack_heads(worker.model_runner.get_model())

    def differing_tensors(self, folder: str) -> list[str]:
        """Names of published tensors that this worker does not serve as they are in `folder`.

        Layers whose weights are kept only in a packed form answer for a random input instead: the output must be
        that of the published weight, up to rounding.
        """
        worker: Any = self
        model = worker.model_runner.get_model()
        published = dict(_tensors(Path(folder)))
        packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        differing: list[str] = []
        for name, layer in model.named_modules():
            names = _published_names(name, packed)
            if not all(n in published for n in names):
                # A tied head has no tensor of its own.
                if not (isinstance(layer, ParallelLMHead) and "model.embed_tokens.weight" in published):
                    continue
                names = ["model.embed_tokens.weight"]
            weight = torch.cat([published[n] for n in names])
            if not _serves(layer, weight):
                tied = isinstance(layer, ParallelLMHead) and names == ["model.embed_tokens.weight"]
                differing += ["lm_head.weight (tied to model.embed_tokens.weight)"] if tied else names
        return differing


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
def _serves(layer: nn.Module, weight: Tensor) -> bool:
    served: Any = getattr(layer, "weight", None)
    if not isinstance(layer, LinearBase | ParallelLMHead):
        if served is None or served.shape[1:] != weight.shape[1:] or served.shape[0] < weight.shape[0]:
            return True  # not a layout that can be compared
        return bool(torch.equal(served[: weight.shape[0]].cpu(), weight.to(served.dtype)))
    if layer.tp_size > 1:
        return True  # split over GPUs: each has a part only
    dtype: torch.dtype = served.dtype
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBE_ROWS, weight.shape[1], generator=generator).to(dtype)
    wanted = nn.functional.linear(probe.float(), weight.to(dtype).float())
    method: Any = layer.quant_method
    answer = method.apply(layer, probe.to(served.device), None)[:, : weight.shape[0]].float().cpu()
    scale = float(wanted.abs().mean())
    return float((answer - wanted).abs().max()) <= (1e-3 if dtype == torch.float32 else 5e-2) * scale
