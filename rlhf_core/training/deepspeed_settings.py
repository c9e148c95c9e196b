"""Import and configuration of DeepSpeed."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from rlhf_core.config.engines.training import LARGEST_BUCKET, EngineConfig
from rlhf_core.config.stages.trained import OptimizerConfig


def import_deepspeed() -> Any:
    """Import DeepSpeed without its log output; it reads the environment and prints at import."""
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # Disable DeepSpeed's operators: probing them runs compilers, and the one built at start (shared-memory all-reduce,
    # a minute of compilation) is for tensor-parallel inference only.
    deepspeed.ops.__compatible_ops__ = {}
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # called by DeepSpeed
    return deepspeed


def deepspeed_settings(engine: EngineConfig, optimizer: OptimizerConfig | None, parameters: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration. parameters: number of those that are trained."""
    stage = _stage(engine, trained=optimizer is not None)
    settings: dict[str, Any] = {
        # The number of micro-batches varies, and losses are not divided by it: the accumulation boundary is step(), or
        # the last backward at stage 0.
        "managed_gradient_accumulation": stage == 0,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1 << 62,
        "zero_allow_untested_optimizer": True,
        # torch's AdamW works in host memory too; DeepSpeed's would be compiled at the first start.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(engine, parameters, trained=optimizer is not None),
        # Set even if 0: by default DeepSpeed clips at 1.
        "gradient_clipping": (optimizer.max_gradient_norm or 0.0) if optimizer is not None and stage > 0 else 0.0,
    }
    # A frozen model that is not sharded stays as it is: DeepSpeed would keep float32 weights for an optimizer.
    if engine.dtype == "bfloat16" and stage > 0:
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"
    return _merged(settings, engine.deepspeed)


def _merged(settings: Mapping[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` with `passed` in their blocks. It may replace sizes of buckets; the recipe refuses the rest."""
    blocks = {
        name: _merged(block, passed[name])
        for name, block in settings.items()
        if isinstance(block, dict) and name in passed
    }
    return {**settings, **passed, **blocks}


def _stage(engine: EngineConfig, *, trained: bool) -> int:
    """Return the ZeRO stage: of a frozen model, which has no optimizer to divide, 3 or none."""
    return engine.sharding if trained or engine.sharding == 3 else 0


def _zero(engine: EngineConfig, parameters: int, *, trained: bool) -> dict[str, Any]:
    # DeepSpeed would allocate its default for any model, and rejects odd numbers.
    bucket = max(2, min(parameters + parameters % 2, LARGEST_BUCKET))
    zero: dict[str, Any] = {
        "stage": _stage(engine, trained=trained),
        "overlap_comm": engine.overlap_comm,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    in_host_memory = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if engine.offload_optimizer and trained:
        zero["offload_optimizer"] = in_host_memory
    if engine.offload_parameters:
        zero["offload_param"] = in_host_memory
    if engine.hpz_partition_size is not None:
        zero["zero_hpz_partition_size"] = engine.hpz_partition_size
    return zero
