"""Checks of whether vLLM can serve a model, by the model's config.json. Imports no torch.

Used before a run, for every available model, and by the engine itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from rlhf_core.config.base import DTYPE_BYTES, Dtype
from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.errors import StageError, reason_of
from rlhf_core.models.folders.caches import caches_all_tokens
from rlhf_core.models.folders.folder import has_experts, text_config
from rlhf_core.models.folders.vision_models import VISION_MODELS, reads_images

# Constants of vLLM on CPU. A test compares them with vLLM's own, whose import takes seconds.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_BLOCK_TOKENS = 128  # tokens per block of the key-value cache

VOCABULARY_PADDING = 64  # vLLM pads the rows of the embedding to a multiple of it

_GIB = 2**30


def problems(
    settings: Mapping[str, Any], class_settings: Mapping[str, Any], engine: VllmEngineConfig, dtype: Dtype | None
) -> Iterator[str]:
    """Yield the reasons why an engine cannot serve a model.

    settings: its config.json. class_settings: its class's settings. dtype: of the engine; None: unknown.
    """
    if not engine.gpus_per_engine:
        yield from problems_on_cpu(settings, engine, dtype)
    if engine.workers_per_engine > 1:
        yield from split_problems(class_settings, engine)


def require_image_libraries(config: Mapping[str, Any]) -> None:
    """Raise StageError if vLLM cannot import its module of an architecture that reads images: it would not say why.

    config: config.json of a model that reads images.
    """
    kind = config["model_type"]
    for name in VISION_MODELS[kind].engine_libraries:
        try:
            import_module(name)
        except Exception as error:  # a build for another device raises errors of other types than ImportError
            raise StageError(
                f"vLLM needs {name} to serve a {kind}, and it cannot be imported ({reason_of(error)}): install a build "
                "for this one of torch; stages without engines, such as sft and reward_model, do without it"
            ) from error


def problems_on_cpu(config: Mapping[str, Any], rollout: VllmEngineConfig, dtype: Dtype | None) -> Iterator[str]:
    """Yield the reasons why an engine on CPU cannot serve the model of this config.json.

    dtype: of the engine; None: unknown, and assumed to be the smaller one.
    """
    size = _head_size(config)
    if size is not None and size not in CPU_HEAD_SIZES:
        yield (
            f"the model's attention heads have size {size}; on CPU vLLM serves "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}: take another model, or set rollout.gpus_per_engine"
        )
    if reads_images(config) and VISION_MODELS[config["model_type"]].sees_whole_images:
        yield (
            "on CPU vLLM lets a token of an image see those before it alone, and this model all of its image: set "
            "rollout.gpus_per_engine, or take another model"
        )
    needed = _cache_bytes(config, rollout, dtype or "bfloat16")
    if needed is not None and needed > _largest_cache(rollout):
        needed *= rollout.workers_per_engine
        yield (
            f"rollout.cpu_cache_gib={rollout.cpu_cache_gib:g} has no room for one sequence of rollout.max_length="
            f"{rollout.max_length} tokens, whose keys and values are {needed / _GIB:.3g} GiB of this model: raise it"
        )


def cpu_cache_bytes(config: Mapping[str, Any], rollout: VllmEngineConfig, dtype: Dtype) -> int:
    """Return the size of the key-value cache of each worker of an engine on CPU, allocated and written at the start.

    At most its share of cpu_cache_gib, and no more than the engine's sequences can fill.
    """
    filled = _cache_bytes(config, rollout, dtype, rollout.max_sequences)
    return _largest_cache(rollout) if filled is None else min(filled, _largest_cache(rollout))


def _largest_cache(rollout: VllmEngineConfig) -> int:
    """Return the most bytes of one worker's key-value cache on CPU."""
    return int(rollout.cpu_cache_gib * _GIB) // rollout.workers_per_engine


def split_problems(settings: Mapping[str, Any], rollout: VllmEngineConfig) -> Iterator[str]:
    """Yield the reasons why the workers of one engine cannot share the model.

    settings: its config.json, or its class's settings; missing ones are not checked.
    """
    text, ranks, stages = text_config(settings), rollout.tensor_parallel_size, rollout.pipeline_parallel_size
    uneven = next((part for part in _split_parts(text, ranks)), None)
    if uneven is not None:
        even = [str(n) for n in range(1, ranks) if not any(_split_parts(text, n))]
        yield (
            f"rollout.tensor_parallel_size={ranks} does not divide the model's {uneven}, of which every GPU has an "
            f"equal part: set it to {even[-1]}" + (f" (or {', '.join(even[:-1])})" if len(even) > 1 else "")
        )
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and stages > layers:
        yield (
            f"rollout.pipeline_parallel_size={stages} is more than the model's {layers} layers, of which every GPU has "
            f"one at least: set it to {layers} at most"
        )


def _split_parts(text: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Yield the parts of the model that `ranks` GPUs cannot share equally, as divided by vLLM."""
    heads, kv_heads, width = (text.get(n) for n in ("num_attention_heads", "num_key_value_heads", "intermediate_size"))
    if isinstance(heads, int) and heads % ranks:
        yield f"{heads} attention heads"
    # Fewer heads than GPUs are replicated. With a latent cache there are none to divide.
    if isinstance(kv_heads, int) and not text.get("kv_lora_rank") and max(kv_heads, ranks) % min(kv_heads, ranks):
        yield f"{kv_heads} key-value heads"
    if isinstance(width, int) and width % ranks and not has_experts(text):
        yield f"intermediate_size of {width}"
    rows = text.get("vocab_size")
    if isinstance(rows, int) and (padded := -(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING) % ranks:
        yield f"vocabulary, padded to {padded} tokens"


def _head_size(config: Mapping[str, Any]) -> int | None:
    text = text_config(config)
    heads, width = text.get("num_attention_heads"), text.get("hidden_size")
    size = text.get("head_dim") or (width // heads if isinstance(heads, int) and isinstance(width, int) else None)
    return size if isinstance(size, int) else None


def _cache_bytes(config: Mapping[str, Any], rollout: VllmEngineConfig, dtype: Dtype, sequences: int = 1) -> int | None:
    """Return the minimum cache of one worker on CPU for this number of sequences; with less than for one, vLLM does
    not start.

    None if the model does not cache all tokens, or its config is incomplete.
    """
    if not caches_all_tokens(config):
        return None
    text = text_config(config)
    layers, heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    kv_heads, size = text.get("num_key_value_heads") or heads, _head_size(text)
    if not isinstance(layers, int) or not isinstance(kv_heads, int) or size is None:
        return None
    # The engine needs one token more than max_length, and keeps one block empty.
    blocks = sequences * -(-(rollout.max_length + 1) // CPU_BLOCK_TOKENS) + 1
    layers_of_worker = -(-layers // rollout.pipeline_parallel_size)
    heads_of_worker = max(1, kv_heads // rollout.tensor_parallel_size)
    return blocks * CPU_BLOCK_TOKENS * layers_of_worker * 2 * heads_of_worker * size * DTYPE_BYTES[dtype]
