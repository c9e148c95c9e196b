"""Conversion of our config and the model's to the arguments of a vLLM engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlhf_core.config.engines.rollout import SamplingConfig, VllmEngineConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import StageError
from rlhf_core.models.adapters import adapted_layers
from rlhf_core.models.folders.class_config import class_config, settings_of
from rlhf_core.models.folders.folder import text_config
from rlhf_core.models.folders.vision_models import reads_images
from rlhf_core.rollout.engine import MOST_TOP_LOGPROBS, EngineSettings
from rlhf_core.rollout.vllm.checks import cpu_cache_bytes, problems_on_cpu, require_image_libraries, split_problems
from rlhf_core.rollout.vllm.environment import set_vllm_environment
from rlhf_core.rollout.vllm.outputs import KeptIn
from rlhf_core.rollout.vllm.passed import passed_arguments

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM has kernels; the last is the maximum in recipes
_WORKER = "rlhf_core.rollout.vllm.worker.PublishedWeights"
_EQUAL_TOKENS = 64  # beyond `top_k`, of a logit equal to the last: vLLM keeps these too
_BATCHED_TOKENS = 4096  # of one forward on CPU: enough for efficient matrix products


def engine_arguments(folder: Path, model: dict[str, Any], settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments of vllm.LLM for the model in `folder`, and set the environment that vLLM reads.

    model: the folder's config.json. Raises ValueError if vLLM cannot serve it with these settings.
    """
    config = settings.config
    assert isinstance(config, VllmEngineConfig)
    _check_length(config.max_length, model)
    # vLLM reads its environment when imported, which takes seconds: hence here, and not above.
    set_vllm_environment()
    from vllm.platforms import current_platform

    split = split_problems(settings_of(class_config(folder)), config) if config.workers_per_engine > 1 else iter(())
    if problem := next(split, None):
        raise ValueError(problem)
    arguments: dict[str, Any] = {
        "dtype": settings.dtype,
        "seed": settings.seed,
        "skip_tokenizer_init": not config.structured_output,  # a grammar is compiled for the tokenizer
        "generation_config": "vllm",  # the folder's generation_config.json must not change the sampling
        # One more than the trajectories' bound: scoring a sequence of full length samples a token after it.
        "max_model_len": config.max_length + 1,
        "max_num_seqs": config.max_sequences,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "distributed_executor_backend": "uni" if config.workers_per_engine == 1 else "mp",
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": not config.compiled,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": _WORKER,
    }
    if reads_images(model):
        require_image_libraries(model)
        # The image processor needs the tokenizer. Engines still return tokens.
        arguments |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": config.max_images}}
    if current_platform.is_cpu():
        current_platform.import_kernels()  # which only logs what it cannot load
        if not hasattr(torch.ops._C, "init_cpu_memory_env"):
            raise StageError("vLLM cannot load its kernels for CPUs, as it says above: they need libnuma (libnuma1)")
        if problem := next(problems_on_cpu(model, config, settings.dtype), None):
            raise ValueError(problem)
        # VLLM_CPU_KVCACHE_SPACE is in whole GiB; a given size also skips a warm-up that measures memory.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        arguments["kv_cache_memory_bytes"] = cpu_cache_bytes(model, config, settings.dtype)
        # A prompt split by the token budget fails on CPU if its request has a seed: vLLM would rewind a random
        # generator that does not support it. So prompts are not split, but wait for the next forward if necessary.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(_BATCHED_TOKENS, config.max_length + 1)
    else:
        arguments["gpu_memory_utilization"] = config.memory_share
        arguments["enable_sleep_mode"] = settings.sleeps
    if settings.kept_of is not None:
        arguments["max_logprobs"] = max(kept_in(settings.kept_of, model).returned, MOST_TOP_LOGPROBS)
    if settings.lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in LORA_RANKS if settings.lora.rank <= rank),
            "lora_target_modules": _lora_modules(settings.lora, folder),
        }
    return arguments | (passed_arguments(config.vllm) if config.vllm else {})


def kept_in(kept_of: SamplingConfig, model: dict[str, Any]) -> KeptIn:
    """Return the reader of the tokens that truncated sampling keeps. model: its config.json."""
    vocabulary: int = text_config(model)["vocab_size"]
    return KeptIn(min(2 * kept_of.top_k + _EQUAL_TOKENS, vocabulary), vocabulary)


def _check_length(max_length: int, model: dict[str, Any]) -> None:
    context: int | None = text_config(model).get("max_position_embeddings")
    if context is None:
        return
    if max_length > context:
        raise ValueError(f"max_length is {max_length}, but the model was made for {context} tokens")
    if max_length == context:
        # Only the token sampled after a scored sequence is beyond the context, and it is never an input of the model.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"


def _lora_modules(lora: LoraConfig, folder: Path) -> list[str]:
    """Return the layers that adapters may change: if vLLM wraps the output head too, it cannot score prompts on CPU."""
    if lora.target_modules == "all-linear":
        with torch.device("meta"):  # without weights: only types and names of layers are read
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            auto: Any = AutoModelForImageTextToText if reads_images(config.to_dict()) else AutoModelForCausalLM
            model = auto.from_config(config)
        return adapted_layers(model)
    if "lm_head" in lora.target_modules:
        raise ValueError("lora.target_modules names lm_head, whose adapters the engines cannot serve; remove it")
    return sorted(lora.target_modules)
