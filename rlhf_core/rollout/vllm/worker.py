"""Extension of vLLM's workers: loading published weights, reading served ones back, and freeing memory.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls it by `collective_rpc`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from rlhf_core.models.folders.adapter_check import scaling_of
from rlhf_core.models.safetensors_file import read_safetensors, read_shapes
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.engine import ServedTensor
from rlhf_core.rollout.proof import GivenColumns, GivenTensor
from rlhf_core.rollout.shards import ServedShard, Shard
from rlhf_core.rollout.transport.base import Transport, WeightManifest, Weights, take_all
from rlhf_core.rollout.vllm.experts import choose_kernels_as_without_adapters, forget_kernels
from rlhf_core.rollout.vllm.memory import drop_packed_embeddings, empty_cache
from rlhf_core.rollout.vllm.served import ServedLayer, served_adapter, served_layers
from rlhf_core.system.freed_memory import return_freed_memory
from rlhf_core.system.stacks import register

if current_platform.is_cpu():  # this module is imported in each worker before it loads its model
    choose_kernels_as_without_adapters()


class PublishedWeights:
    """A mixin of a vLLM worker, which has `reload_weights`, `model_runner` and `model_config`."""

    _given: Mapping[str, GivenTensor] = {}  # tensors that it packs or shares with other workers, as received last
    _given_before: Mapping[str, GivenTensor] = {}
    _knows_unchanged = False  # whether it has recorded the tensors that no publish has
    _unread_digests: dict[str, str]  # of received tensors that cannot be read back
    _given_adapter: dict[str, Tensor]
    _adapter_scaling: float

    def prepare(self, compiled: bool) -> None:
        """Make ready to compute, after the start. compiled: as configured."""
        worker: Any = self
        register(f"worker {worker.rank} of an engine")  # unless it is the engine's own process
        runner = worker.model_runner
        if not compiled:
            torch.compiler.set_stance("force_eager")
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            # A later stage of a pipeline receives into this buffer, which vLLM allocates only in the warm-up that a
            # given cache size skips on CPU. Without it, this stage fails, and vLLM does not report that.
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=worker.model_config.dtype, device=runner.device
            )

    def load_published(self, transport: Transport, manifest: WeightManifest) -> None:
        """Replace the served tensors by those received from `transport`."""
        worker: Any = self
        model = worker.model_runner.get_model()
        layers = list(self._served_layers())
        if manifest.unchanged and not self._knows_unchanged:
            take_all(self._recorded(self._initial(manifest.unchanged), layers, version=0))
            self._knows_unchanged = True
        if current_platform.is_cpu():
            forget_kernels(model, manifest.unchanged)
        weights = self._recorded(transport.receive(manifest, worker.rank), layers, manifest.version)
        worker.reload_weights(weights_iterator=weights)
        take_all(weights)
        if current_platform.is_cpu():
            repack_heads(model)

    def _recorded(self, weights: Weights, layers: Sequence[ServedLayer], version: int) -> Weights:
        """Yield `weights`, and record the digests that the proof needs."""
        worker: Any = self
        dtype = worker.model_config.dtype  # some layers keep a bias in float32
        packed = {name for layer in layers if layer.read_columns for name in layer.published}
        shards = {name: shard for layer in layers for name, shard in zip(layer.published, layer.shards, strict=True)}
        readable = _readable(layers)
        given: dict[str, GivenTensor] = {}
        unread: dict[str, str] = {}
        for name, tensor in weights:
            if name in packed or (name in shards and not shards[name].is_whole):
                share = shards[name].of(tensor).to(dtype)
                columns = GivenColumns.of(share, version) if name in packed else None
                digest = tensor_digest(tensor)
                same = shards[name].is_whole and tensor.dtype == dtype
                given[name] = GivenTensor(digest, digest if same else tensor_digest(share), columns)
            elif name not in readable:
                unread[name] = tensor_digest(tensor)
            yield name, tensor
        self._given, self._given_before = {**self._given, **given}, self._given
        self._unread_digests = {**getattr(self, "_unread_digests", {}), **unread}

    def _initial(self, names: Set[str]) -> Weights:
        """Yield those of the weights that the engine was started with."""
        config = cast(Any, self).model_config
        for name, tensor in read_safetensors(Path(config.model)):
            if name in names:
                yield name, tensor.to(config.dtype)

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
        self._adapter_scaling = scaling_of(settings)

    def served_tensors(self, whole: bool) -> list[ServedShard]:
        """Return this worker's shards of the model's tensors; with adapters, of those of the adapter, if one is loaded.

        whole: read packed weights back in full. Otherwise a weight counts as received if a few of its columns do.
        """
        worker: Any = self
        if worker.vllm_config.lora_config is not None:
            given: dict[str, Tensor] = getattr(self, "_given_adapter", {})
            if not given:
                return []
            served = served_adapter(self, given, self._adapter_scaling)
            return [
                ServedShard(
                    ServedTensor(
                        name, name, tensor_digest(given[name] if values is None else values), values is not None
                    ),
                    shard,
                )
                for name, shard, values in served
            ]
        layers = list(self._served_layers())
        if not hasattr(self, "_unread_digests"):  # before the first publish, it serves its initial weights
            known = {
                name for layer in layers for name, s in zip(layer.published, layer.shards, strict=True) if s.is_whole
            }
            unknown = read_shapes(Path(worker.model_config.model)).keys() - known
            take_all(self._recorded(self._initial(unknown), layers, version=0))
        return [
            *(shard for layer in layers for shard in self._read_back(layer, whole)),
            *(
                ServedShard(ServedTensor(n, n, digest, read_back=False), Shard.whole(1))
                for n, digest in self._unread_digests.items()
            ),
        ]

    def _read_back(self, layer: ServedLayer, whole: bool) -> Iterator[ServedShard]:
        worker: Any = self
        dtype = worker.model_config.dtype
        given = [self._given[name] for name in layer.published if name in self._given]
        columns = [each.columns for each in given if each.columns is not None]
        by_columns = not whole and layer.read_columns is not None and len(columns) == len(layer.published)
        if by_columns and layer.digest_columns(columns[0].indices, dtype) == [each.digest for each in columns]:
            for name, published, shard, each in zip(layer.names, layer.published, layer.shards, given, strict=True):
                yield ServedShard(ServedTensor(name, published, each.digest), shard)
            return
        for name, published, shard, values in layer.tensors():
            digest = self._published_digest(published, tensor_digest(values.to(dtype)))
            yield ServedShard(ServedTensor(name, published, digest), shard)

    def _published_digest(self, name: str, digest: str) -> str:
        """Return the digest of the whole tensor of whose share `digest` is; of unknown values, `digest` itself."""
        if name not in self._given:
            return digest
        known = [self._given[name], *filter(None, [self._given_before.get(name)]), *self._given.values()]
        return next((each.digest for each in known if each.shard_digest == digest), digest)

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
