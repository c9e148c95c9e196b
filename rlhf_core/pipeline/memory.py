"""Device memory of a stage, estimated from the model's shape and the stage's settings.

Per training worker, of a model with P parameters of which T are trained, on n workers, with b bytes per weight:

    weights      b P, divided by n at ZeRO stage 3; in linear layers quantised to NF4 4 bits each, and a float32 for 64
    gradients    4 T (summed in float32), divided by n from stage 2 on; at stage 3 also a bucket of at most 500 million
    gathered     b P at stage 3, of at most a billion parameters: DeepSpeed keeps what it has gathered until the
                 backward pass, for the one model of a worker that computes
    optimizer    8 T for AdamW's two moments, and 4 T for the float32 weights that it updates wherever DeepSpeed keeps
                 a copy of them (bfloat16, or stage 1 and up), divided by n from stage 1 on; none of both on the device
                 with offload_optimizer
    activations  tokens_per_micro_batch x layers x (8 h + 4 i) x b for hidden size h and feed-forward width i; with
                 gradient checkpointing x h x b for each layer, and one layer in full
    head         distributions over the vocabulary, in float32 and in chunks of 64 MiB, of which up to 4 wait for the
                 backward pass (models/logprobs.py); a scalar model has none, but is counted as if

(arXiv:1910.02054, section 3; arXiv:2205.05198, section 4, without the attention matrix, which is never stored.) A
frozen model needs its weights. With tensor_parallel t, P and T are divided by t, and n is n / t. Buffers, fragmentation
and the libraries are not included: about 2 GiB on a GPU. An engine needs its weights, divided over its GPUs, and a
key-value cache of at least one sequence of `max_length`; on CPU a cache of `cpu_cache_gib`, or of the size that
`max_sequences` can fill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlhf_core.config.base import DTYPE_BYTES, Dtype
from rlhf_core.config.engines.rollout import RolloutEngineConfig
from rlhf_core.config.engines.training import LARGEST_BUCKET, EngineConfig
from rlhf_core.config.stages.base import HeldModel, StageConfig
from rlhf_core.models.folders.caches import caches_all_tokens
from rlhf_core.models.folders.folder import text_config

_NF4_BYTES = 0.5 + 4 / 64  # of a weight: 4 bits, and its share of its block's float32
_MOST_GATHERED = 1e9  # parameters, by default of DeepSpeed
HEAD_CHUNK, KEPT_CHUNKS = 2**24, 4  # of models.logprobs: elements of a chunk, chunks that wait for backward


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a decoder-only transformer."""

    parameters: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head: int  # dimensions of one
    caches_all_tokens: bool = True  # in every layer of an engine
    vocabulary: int = 0  # of the output head

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int | None = None) -> Shape | None:
        """Return the shape of a model's config.json; None if it is incomplete. parameters: their number, if counted."""
        text = text_config(config)
        try:
            hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
            heads = int(text["num_attention_heads"])
            shared = int(text.get("num_key_value_heads") or heads)
            intermediate, vocabulary = int(text["intermediate_size"]), int(text["vocab_size"])
            head = int(text.get("head_dim") or hidden // heads)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None
        if parameters is None:
            attention = 2 * hidden * head * (heads + shared)
            embeddings = vocabulary * hidden * (1 if text.get("tie_word_embeddings") else 2)
            parameters = layers * (attention + 3 * hidden * intermediate) + embeddings
        return cls(parameters, hidden, intermediate, layers, heads, shared, head, caches_all_tokens(config), vocabulary)

    def trained(self, rank: int | None) -> int:
        """Return the number of trained parameters: all, or those of an adapter on every linear layer of the blocks."""
        if rank is None:
            return self.parameters
        attention = 2 * (2 * self.hidden + self.head * (self.heads + self.key_value_heads))
        widths = attention + 3 * (self.hidden + self.intermediate)
        return self.layers * rank * widths

    @property
    def linear(self) -> int:
        """Parameters in the linear layers of the blocks."""
        attention = 2 * self.hidden * self.head * (self.heads + self.key_value_heads)
        return min(self.parameters, self.layers * (attention + 3 * self.hidden * self.intermediate))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of each worker and of each GPU (or, on CPU, process) of an engine."""

    worker: float = 0.0
    engine: float = 0.0


def memory(config: StageConfig, shape: Shape, shapes: Mapping[str, Shape] = MappingProxyType({})) -> Memory:
    """Return the memory of a stage's actors for an initial model of this shape.

    shapes: those of the models of its other inputs, if known; others are assumed to be as large.
    """
    groups = []
    for together in config.held_models():
        held = [(model, shapes.get(model.start, shape)) for model in together]
        gathered = max((_gathered(*each) for each in held), default=0.0)
        groups.append(sum(_of_model(*each) for each in held) + gathered)
    dtype = config.model_dtype or "bfloat16"
    engine = 0.0 if config.engines is None else _of_engine(config.engines, shape, dtype)
    return Memory(max(groups, default=0.0), engine)


def _of_model(held: HeldModel, shape: Shape) -> float:
    engine = held.engine
    workers = held.placement.workers / engine.tensor_parallel
    weights = _weights(engine, shape.parameters, workers)
    if held.quantised:
        weights = _weights(engine, shape.parameters - shape.linear, workers) + _NF4_BYTES * shape.linear
    if not held.trained:
        return weights
    trained, stage = shape.trained(held.adapter_rank) / engine.tensor_parallel, engine.sharding
    gradients = 4.0 * trained / (workers if stage >= 2 else 1)
    if stage == 3:
        gradients += 4.0 * min(trained, _zero_setting(engine, "reduce_bucket_size", LARGEST_BUCKET))
    copied = engine.dtype == "bfloat16" or stage >= 1
    optimizer = (8.0 + (4.0 if copied else 0.0)) * trained / (workers if stage >= 1 else 1)
    on_device = 0.0 if engine.offload_optimizer else optimizer
    tokens = engine.micro_batch_tokens(held.placement) / engine.sequence_parallel
    return weights + gradients + on_device + tokens * _kept(engine, shape) + _of_head(tokens * shape.vocabulary)


def _weights(engine: EngineConfig, parameters: int, workers: float) -> float:
    if engine.offload_parameters:
        return 0.0
    return DTYPE_BYTES[engine.dtype] * parameters / engine.tensor_parallel / (workers if engine.sharding == 3 else 1)


def _gathered(held: HeldModel, shape: Shape) -> float:
    """Return the bytes of weights that ZeRO 3 has gathered."""
    if held.engine.sharding < 3:
        return 0.0
    most = _zero_setting(held.engine, "stage3_max_live_parameters", _MOST_GATHERED)
    return DTYPE_BYTES[held.engine.dtype] * min(shape.parameters, most)


def _zero_setting(engine: EngineConfig, name: str, default: float) -> float:
    """Return a number of elements that the recipe may pass to DeepSpeed."""
    passed: Mapping[str, float] = engine.deepspeed.get("zero_optimization", {})
    return passed.get(name, default)


def _kept(engine: EngineConfig, shape: Shape) -> float:
    """Return the bytes of activations that a token keeps for the backward pass."""
    layer = 8.0 * shape.hidden + 4.0 * shape.intermediate
    match engine.gradient_checkpointing:
        case False:
            kept = shape.layers * layer
        case True:
            kept = shape.layers * shape.hidden + layer
        case "selective":
            kept = shape.layers * (6.0 * shape.hidden + 2.0 * shape.intermediate) + layer
    return kept * DTYPE_BYTES[engine.dtype]


def _of_head(logits: float) -> float:
    """Return the bytes of so many logits: of chunks that are kept, and of the gradient of one, or of one that is
    computed again.
    """
    chunks = max(1, math.ceil(logits / HEAD_CHUNK))
    return 4.0 * logits / chunks * (chunks + 1 if chunks <= KEPT_CHUNKS else KEPT_CHUNKS + 3)


def _of_engine(rollout: RolloutEngineConfig, shape: Shape, dtype: Dtype) -> float:
    spread = rollout.workers_per_engine
    of_token = 2.0 * shape.layers * shape.key_value_heads * shape.head * DTYPE_BYTES[dtype]
    cache = rollout.cache_bytes(of_token * rollout.max_length, of_all_tokens=shape.caches_all_tokens)
    return (DTYPE_BYTES[dtype] * shape.parameters + cache) / spread
