"""How DeepSpeed is imported and configured."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import OptimizerConfig


def import_deepspeed() -> Any:
    """Import DeepSpeed without its log output; it reads the environment and prints at import."""
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # No operator is taken from DeepSpeed's list: probing it runs compilers, and the one it would build at start
    # (shared-memory all-reduce, a minute of compiling) serves tensor-parallel inference only.
    deepspeed.ops.__compatible_ops__ = {}
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed calls them
    return deepspeed


def deepspeed_settings(engine: EngineConfig, optimizer: OptimizerConfig | None, parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration of an engine for a model with this number of parameters."""
    stage = engine.sharding
    settings: dict[str, Any] = {
        # The caller's micro-batches vary in number, and nothing is divided by a count: step() is the boundary, or, at
        # stage 0, the last backward.
        "managed_gradient_accumulation": stage == 0,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1 << 62,
        "zero_allow_untested_optimizer": True,
        # torch's own AdamW works in host memory too; DeepSpeed's would be compiled at the first start.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(engine, parameters, trained=optimizer is not None),
        # Set even if it is 0: DeepSpeed's default is to clip at 1.
        "gradient_clipping": optimizer.max_gradient_norm if optimizer is not None and stage > 0 else 0.0,
    }
    if engine.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"
    return settings


def _zero(engine: EngineConfig, parameters: int, *, trained: bool) -> dict[str, Any]:
    # Elements; DeepSpeed would reserve its 500 million for any model, and refuses an odd number.
    bucket = min(parameters + parameters % 2, 500_000_000)
    zero: dict[str, Any] = {
        "stage": engine.sharding,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    in_host_memory = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if engine.offload_optimizer and trained:
        zero["offload_optimizer"] = in_host_memory
    if engine.offload_parameters:
        zero["offload_param"] = in_host_memory
    return zero
