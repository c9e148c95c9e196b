"""What a stage needs of each device's memory, estimated from the model's shape and the stage's settings.

Per training worker, of a model with P parameters of which T are trained, on n workers, with b bytes a weight:

    weights      b P, divided by n at ZeRO stage 3
    gradients    4 T (summed in float32), divided by n from stage 2 on
    optimizer    8 T for AdamW's two moments, and 4 T for the float32 weights that it updates wherever DeepSpeed keeps
                 a copy of them (bfloat16, or stage 1 and up), divided by n from stage 1 on; none of both on the device
                 with offload_optimizer
    activations  tokens_per_micro_batch x layers x (8 h + 4 i) x b for hidden size h and feed-forward width i; with
                 gradient checkpointing x h x b for each layer, and one layer in full

(arXiv:1910.02054, section 3; arXiv:2205.05198, section 4, without the attention matrix, which is never stored.) What a
frozen model needs is its weights. Buffers, fragmentation and the libraries are not in it: about 2 GiB on a GPU. An
engine needs its weights, divided over its GPUs, and a key-value cache of at least one sequence of `max_length`; on CPU
it has one of `cpu_cache_gib`, or of what `max_sequences` can fill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlhf_core.config.base import DTYPE_BYTES, Dtype
from rlhf_core.config.engine import EngineConfig
from rlhf_core.config.evaluation import EvaluationConfig
from rlhf_core.config.logprobs import ReadingConfig
from rlhf_core.config.placement import Placement
from rlhf_core.config.rl import RLConfig
from rlhf_core.config.rollout import RolloutEngineConfig
from rlhf_core.config.sampled import GenerateConfig
from rlhf_core.config.stage import StageConfig
from rlhf_core.config.training import LoraConfig, SupervisedConfig
from rlhf_core.models.folder import text_config
from rlhf_core.models.served import caches_all_tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a decoder-only transformer."""

    parameters: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    caches_all_tokens: bool = True  # in every layer of an engine

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int | None = None) -> Shape | None:
        """Of a model's config.json; None where that does not say it. parameters: where they have been counted."""
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
        return cls(parameters, hidden, intermediate, layers, heads, shared, caches_all_tokens(config))

    def trained(self, lora: LoraConfig | None) -> int:
        """Parameters that are trained: all, or those of an adapter on every linear layer of the blocks."""
        if lora is None:
            return self.parameters
        kept = self.hidden * self.key_value_heads // self.heads
        widths = 2 * (2 * self.hidden) + 2 * (self.hidden + kept) + 3 * (self.hidden + self.intermediate)
        return self.layers * lora.rank * widths


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes, of each worker and of each GPU (or, on CPU, process) of an engine."""

    worker: float = 0.0
    engine: float = 0.0


def memory(config: StageConfig, shape: Shape, frozen: Mapping[str, Shape] = MappingProxyType({})) -> Memory:
    """What the actors of a stage need that starts from a model of this shape.

    frozen: the shapes of `frozen_models` where they are known; others are taken to be as large.
    """
    match config:
        case RLConfig():
            return Memory(_of_rl_worker(config, shape), _of_engine(config.rollout, shape, config.engine.dtype))
        case SupervisedConfig():
            workers = config.placement.workers
            beside = sum(
                _weights(engine, frozen.get(start, shape).parameters, workers)
                for start, engine in config.frozen_models.items()
            )
            return Memory(_of_training(config.engine, shape, config.adapter, config.placement) + beside)
        case ReadingConfig():
            return Memory(_weights(config.engine, shape.parameters, config.placement.workers))
        case GenerateConfig():
            engine = _of_engine(config.rollout, shape, "bfloat16")
            each = [_weights(run, shape.parameters, placement.workers) for run, placement in config.readers.values()]
            return Memory(max(each, default=0.0), engine)
        case EvaluationConfig():
            return Memory(engine=_of_engine(config.rollout, shape, "bfloat16"))
        case _:
            return Memory()


def _of_rl_worker(config: RLConfig, shape: Shape) -> float:
    """The policy and all models that share its workers; a critic and a judge are taken to be as large as the policy."""
    settings, workers = config.settings, config.placement.workers
    needed = _of_training(config.engine, shape, config.lora, config.placement)
    frozen = [f"reward:{name}" for name in settings.model_rewards]
    if settings.uses_reference and not config.reference_is_base:
        frozen.append("reference")
    if settings.teacher is not None:
        frozen.append("teacher")
    for role in frozen:
        if role not in config.own_placements:
            needed += _weights(config.engine_of(role), shape.parameters, workers)
    if settings.critic_settings is not None:
        needed += _of_training(config.engine_of("critic"), shape, settings.critic_settings.lora, config.placement)
    return needed


def _of_training(engine: EngineConfig, shape: Shape, lora: LoraConfig | None, placement: Placement) -> float:
    trained, stage, workers = shape.trained(lora), engine.sharding, placement.workers
    gradients = 4.0 * trained / (workers if stage >= 2 else 1)
    copied = engine.dtype == "bfloat16" or stage >= 1
    optimizer = (8.0 + (4.0 if copied else 0.0)) * trained / (workers if stage >= 1 else 1)
    on_device = 0.0 if engine.offload_optimizer else optimizer
    return _weights(engine, shape.parameters, workers) + gradients + on_device + _activations(engine, shape, placement)


def _weights(engine: EngineConfig, parameters: int, workers: int) -> float:
    if engine.offload_parameters:
        return 0.0
    return DTYPE_BYTES[engine.dtype] * parameters / (workers if engine.sharding == 3 else 1)


def _activations(engine: EngineConfig, shape: Shape, placement: Placement) -> float:
    layer = 8.0 * shape.hidden + 4.0 * shape.intermediate
    match engine.gradient_checkpointing:
        case False:
            kept = shape.layers * layer
        case True:
            kept = shape.layers * shape.hidden + layer
        case "selective":
            kept = shape.layers * (6.0 * shape.hidden + 2.0 * shape.intermediate) + layer
    return engine.micro_batch_tokens(placement) * kept * DTYPE_BYTES[engine.dtype]


def _of_engine(rollout: RolloutEngineConfig, shape: Shape, dtype: Dtype) -> float:
    spread = rollout.gpus_of_engine
    of_token = 2.0 * shape.layers * shape.key_value_heads * (shape.hidden / shape.heads) * DTYPE_BYTES[dtype]
    cache = of_token * rollout.max_length
    if not rollout.gpus_per_engine:
        largest = rollout.cpu_cache_gib * 2**30
        cache = min(largest, rollout.max_sequences * cache) if shape.caches_all_tokens else largest
    return (DTYPE_BYTES[dtype] * shape.parameters + cache) / spread
