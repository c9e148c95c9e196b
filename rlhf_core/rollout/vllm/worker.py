"""Extension of vLLM's workers: loading published weights, reading served ones back, and freeing memory.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls it by `collective_rpc`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from rlhf_core.models.safetensors_file import read_safetensors, read_shapes
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.engine import ServedTensor
from rlhf_core.rollout.proof import GivenMatrix
from rlhf_core.rollout.transport.base import Transport, WeightManifest, take_all
from rlhf_core.rollout.vllm.experts import choose_kernels_as_without_adapters, forget_kernels
from rlhf_core.rollout.vllm.memory import drop_packed_embeddings, empty_cache
from rlhf_core.rollout.vllm.served import ServedLayer, served_adapter, served_layers
from rlhf_core.system.freed_memory import return_freed_memory

if current_platform.is_cpu():  # this module is imported in each worker before it loads its model
    choose_kernels_as_without_adapters()


class PublishedWeights:
    """A mixin of a vLLM worker, which has `reload_weights`, `model_runner` and `model_config`."""

    _unread_digests: dict[str, str]  # of received tensors that cannot be read back
    _given: Mapping[str, GivenMatrix] = {}  # the tensors that the engine packs; empty before a publish
    _given_adapter: dict[str, Tensor]
    _adapter_scaling: float

    def load_published(self, transport: Transport, manifest: WeightManifest) -> None:
        """Replace the served tensors by those received from `transport`."""
        worker: Any = self
        model = worker.model_runner.get_model()
        layers = list(self._served_layers())
        packed = {name for layer in layers if layer.read_columns for name in layer.published}
        readable = _readable(layers)
        given: dict[str, GivenMatrix] = {}
        unread: dict[str, str] = {}

        def recorded() -> Iterator[tuple[str, Tensor]]:
            """Yield the received tensors, and record the digests that the proof needs."""
            for name, tensor in transport.receive(manifest, worker.rank):
                if name in packed:
                    given[name] = GivenMatrix.of(tensor, worker.model_config.dtype, seed=manifest.version)
                elif name not in readable:
                    unread[name] = tensor_digest(tensor)
                yield name, tensor

        if current_platform.is_cpu():
            forget_kernels(model)
        weights = recorded()
        worker.reload_weights(weights_iterator=weights)
        take_all(weights)
        if current_platform.is_cpu():
            repack_heads(model)
        self._given, self._unread_digests = given, unread

    def free_memory(self) -> None:
        """Free unused memory on CPU, where other processes share it.

        Clears the key-value cache, so no request may be running.
        """
        worker: Any = self
        if current_platform.is_cpu():
            drop_packed_embeddings(worker.model_runner.get_model())
            empty_cache(worker.model_runner.kv_caches)
            return_freed_memory()

    def remember_adapter(self, folder: str) -> None:
        """Store the adapter in `folder`, with which `served_tensors` compares the active one."""
        settings = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
        self._given_adapter = dict(read_safetensors(Path(folder)))
        rank = settings["r"]
        self._adapter_scaling = settings["lora_alpha"] / (math.sqrt(rank) if settings["use_rslora"] else rank)

    def served_tensors(self, whole: bool) -> list[ServedTensor]:
        """Return the tensors of this worker's share of the model; with adapters, of the adapter, if one is loaded.

        whole: read packed weights back in full. Otherwise a weight counts as received if a few of its columns do.
        """
        worker: Any = self
        if worker.vllm_config.lora_config is not None:
            given: dict[str, Tensor] = getattr(self, "_given_adapter", {})
            if not given:
                return []
            served = served_adapter(self, given, self._adapter_scaling)
            return [
                ServedTensor(name, name, tensor_digest(given[name] if values is None else values), values is not None)
                for name, values in served
            ]
        dtype = worker.model_config.dtype  # some layers keep a bias in float32
        layers = list(self._served_layers())
        if not hasattr(self, "_unread_digests"):  # before the first publish, it serves its initial weights
            readable = _readable(layers)
            initial = read_safetensors(Path(worker.model_config.model))
            self._unread_digests = {name: tensor_digest(t.to(dtype)) for name, t in initial if name not in readable}
        return [
            *(tensor for layer in layers for tensor in self._read_back(layer, dtype, whole)),
            *(ServedTensor(n, n, digest, False) for n, digest in self._unread_digests.items()),
        ]

    def _read_back(self, layer: ServedLayer, dtype: torch.dtype, whole: bool) -> list[ServedTensor]:
        if not whole and layer.read_columns and self._given:
            given = [self._given[name] for name in layer.published]
            if layer.digest_columns(given[0].columns, dtype) == [each.columns_digest for each in given]:
                return [
                    ServedTensor(name, published, each.digest)
                    for name, published, each in zip(layer.names, layer.published, given, strict=True)
                ]
        return [ServedTensor(name, published, tensor_digest(t.to(dtype))) for name, published, t in layer.tensors()]

    def _served_layers(self) -> Iterator[ServedLayer]:
        worker: Any = self
        config = worker.model_config
        tied = bool(getattr(config.hf_config, "tie_word_embeddings", False))
        return served_layers(worker.model_runner.get_model(), read_shapes(Path(config.model)), tied=tied)


def _readable(layers: Sequence[ServedLayer]) -> set[str]:
    """Return the published tensors that can be read back, and those of the engine only, such as a tied head."""
    return {name for layer in layers for name in (*layer.published, *layer.names)}


def repack_heads(model: nn.Module) -> None:
    """Pack the output head again from the weight that it shares with the embedding.

    On CPU a head computes with a packed copy of its weight, made once after loading. A reload packs only layers that
    it loads a tensor for; a tied head has none, so it would keep serving the old weights without an error.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
