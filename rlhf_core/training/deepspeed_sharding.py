"""Division of parameters over the ranks as ZeRO 3 does it, before there is an engine."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.models.loading import torch_dtype
from rlhf_core.training.deepspeed_settings import deepspeed_settings, import_deepspeed


class ZeroSharding:
    """Implements models.sharded_loading.Sharding for an engine with zero_stage 3, in its dtype.

    DeepSpeed broadcasts each parameter from rank 0 as it divides it, and `initialize` takes it over as it is.
    """

    def __init__(self, engine: EngineConfig) -> None:
        if not dist.is_initialized():
            raise RuntimeError("call rlhf_core.training.distributed.join_group before loading a sharded model")
        self._dtype = torch_dtype(engine.dtype)
        settings = deepspeed_settings(engine, None, parameters=2)  # buckets are the engine's
        # DeepSpeed's converter of further parameters is an attribute of one that it has converted.
        first = nn.Parameter(torch.zeros(1, dtype=self._dtype))
        import_deepspeed().zero.Init(nn.ParameterList([first]), dtype=self._dtype, config_dict_or_path=settings)
        self._convert: Callable[[list[nn.Parameter]], None] = first.convert_to_zero_parameters  # type: ignore[attr-defined]

    def divide(self, parameter: nn.Parameter) -> None:
        if parameter.is_floating_point():
            # The engine would convert those that transformers keeps in float32, and rejects them once divided.
            parameter.data = parameter.data.to(self._dtype)
        parameter.data = parameter.data.contiguous()
        self._convert([parameter])
