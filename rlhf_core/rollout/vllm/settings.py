"""The settings of a vLLM engine: our config and the model in vLLM's words, or a ValueError that says why not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.models.adapters import adapted_layers
from rlhf_core.models.folders.class_config import class_config, settings_of
from rlhf_core.models.folders.folder import text_config
from rlhf_core.models.folders.remote_code import reads_images
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.rollout.vllm.checks import cpu_cache_bytes, problems_on_cpu, split_problems
from rlhf_core.rollout.vllm.environment import set_vllm_environment

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM has kernels for; recipes may ask for no more
_WORKER = "rlhf_core.rollout.vllm.worker.PublishedWeights"
_BATCHED_TOKENS = 4096  # of one forward, on CPU: enough for matrix products to be efficient


def engine_arguments(folder: Path, model: dict[str, Any], settings: EngineSettings) -> dict[str, Any]:
    """Arguments of vllm.LLM for the model in `folder`; sets the environment that vLLM reads.

    model: the folder's config.json. Raises ValueError where vLLM cannot serve it with these settings.
    """
    config = settings.config
    assert isinstance(config, VllmEngineConfig)
    _check_length(config.max_length, model)
    # vLLM reads its environment when imported, and importing it takes seconds: so here, and not above.
    set_vllm_environment()
    from vllm.platforms import current_platform

    split = split_problems(settings_of(class_config(folder)), config) if config.gpus_of_engine > 1 else iter(())
    if problem := next(split, None):
        raise ValueError(problem)
    arguments: dict[str, Any] = {
        "dtype": settings.dtype,
        "seed": settings.seed,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the folder's generation_config.json must not change the sampling
        # One more than the trajectories' bound: scoring a sequence of full length samples a token after it.
        "max_model_len": config.max_length + 1,
        "max_num_seqs": config.max_sequences,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "distributed_executor_backend": "uni" if config.gpus_of_engine == 1 else "mp",
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": not config.compiled,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": _WORKER,
    }
    if reads_images(model):
        # Its processor of images needs the tokenizer. What an engine samples stays tokens.
        arguments |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": config.max_images}}
    if current_platform.is_cpu():
        if problem := next(problems_on_cpu(model, config, settings.dtype), None):
            raise ValueError(problem)
        # VLLM_CPU_KVCACHE_SPACE takes whole GiB only; a given size also spares a warm-up that measures memory.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        arguments["kv_cache_memory_bytes"] = cpu_cache_bytes(model, config, settings.dtype)
        # A prompt cut in two by the token budget fails on CPU if its request has a seed: vLLM would wind back a random
        # generator that cannot be. So a prompt is taken whole, in the next forward if need be.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(_BATCHED_TOKENS, config.max_length + 1)
    else:
        arguments["gpu_memory_utilization"] = config.memory_share
        arguments["enable_sleep_mode"] = settings.sleeps
    if settings.lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(known for known in LORA_RANKS if settings.lora.rank <= known),
            "lora_target_modules": _lora_modules(settings.lora, folder),
        }
    return arguments


def _check_length(max_length: int, model: dict[str, Any]) -> None:
    context: int | None = text_config(model).get("max_position_embeddings")
    if context is None:
        return
    if max_length > context:
        raise ValueError(f"max_length is {max_length}, but the model was made for {context} tokens")
    if max_length == context:
        # Only the token sampled after a scored sequence lies beyond the context, and it is never fed to the model.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"


def _lora_modules(lora: LoraConfig, folder: Path) -> list[str]:
    """Layers that adapters may change. vLLM would wrap the output head too, and then fails to score prompts on CPU."""
    if lora.target_modules == "all-linear":
        with torch.device("meta"):  # layers without weights: their types and names are all that is asked for
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            auto: Any = AutoModelForImageTextToText if reads_images(config.to_dict()) else AutoModelForCausalLM
            model = auto.from_config(config)
        return adapted_layers(model)
    if "lm_head" in lora.target_modules:
        raise ValueError("lora.target_modules names lm_head, whose adapters the engines cannot serve; leave it out")
    return sorted(lora.target_modules)
