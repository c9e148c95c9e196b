"""One rank's share of a model under DeepSpeed: optimizer steps over any number of micro-batches, and plain forwards."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn

from rlhf_core.config.training import EngineConfig, OptimizerConfig
from rlhf_core.errors import StageError
from rlhf_core.models.adapters import adapter_state
from rlhf_core.models.loading import torch_dtype
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.optimizers import learning_rate, parameter_groups
from rlhf_core.types import PackedBatch

B = TypeVar("B", bound=PackedBatch)
R = TypeVar("R")
Loss = Callable[[nn.Module, B], tuple[Tensor, Mapping[str, Tensor]]]


class DeepSpeedEngine:
    """A wrapped model (PolicyModel, ScalarModel) and its optimizer, sharded over the ranks of the process group.

    The process group must exist (training.distributed.join_group). Every rank calls every method, with the same number
    of micro-batches. bfloat16 means bfloat16 weights and activations over float32 master weights and gradient sums.
    """

    def __init__(
        self, model: nn.Module, *, engine: EngineConfig, optimizer: OptimizerConfig | None, total_steps: int
    ) -> None:
        """optimizer None: a frozen model, for forwards alone. total_steps: optimizer steps of the whole schedule."""
        if optimizer is not None and engine.offload_optimizer and _zero_stage(engine) == 0:
            raise StageError("engine.offload_optimizer needs engine.zero_stage 1, 2 or 3; set one of them")
        if not dist.is_initialized():
            raise RuntimeError("call rlhf_core.training.distributed.join_group before building an engine")
        self.module = model
        self._config = engine
        self._optimizer_config = optimizer
        self._total_steps = total_steps
        self._steps = 0
        self._size = dist.get_world_size()
        # Without ZeRO, DeepSpeed clips but never tells the norm: then the reduced gradients are ours to clip.
        self._manual = _zero_stage(engine) == 0
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self._engine = self._start(model)

    def _start(self, model: nn.Module) -> Any:
        """DeepSpeed's engine; the bare module where nothing is trained or sharded, which needs none."""
        if self._optimizer_config is None:
            model.requires_grad_(False)
            if self._config.zero_stage < 3:
                return model.to(
                    self.device, torch_dtype(self._config.dtype) if _wrong_dtype(model, self._config) else None
                )
        deepspeed = _import_deepspeed()
        optimizer = (
            None if self._optimizer_config is None else _build_optimizer(model, self._config, self._optimizer_config)
        )
        parameters = sum(p.numel() for p in model.parameters())
        settings = _settings(self._config, self._optimizer_config, self._size, parameters)
        started, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        return started

    @property
    def steps(self) -> int:
        """Optimizer steps taken so far."""
        return self._steps

    def step(self, micro_batches: Sequence[B], loss: Loss[B]) -> dict[str, float]:
        """One optimizer step. `loss(model, micro_batch)` returns this micro-batch's share of the step's loss, a sum
        over its tokens divided by a count over the whole step, and metrics that are sums (or counts) too; of a metric
        whose name ends in `_max`, the largest is taken over micro-batches and ranks.

        Gradients are summed over micro-batches and ranks, so how the sequences are split does not change the update.
        Returns each metric summed the same way, with gradient_norm (before clipping) and learning_rate.
        Raises StageError if the gradient is not finite, or if the ranks have different numbers of micro-batches.
        """
        if self._optimizer_config is None:
            raise RuntimeError("this engine was built without an optimizer")
        self._require_same_count(len(micro_batches))
        self._engine.train()
        rate = learning_rate(self._optimizer_config, self._steps, self._total_steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        totals = StepMetrics()
        for i, micro_batch in enumerate(micro_batches):
            if self._manual:
                self._engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            value, metrics = loss(self._engine, micro_batch.to(self.device))
            # DeepSpeed takes the mean over ranks; we want the sum.
            self._engine.backward(value * self._size)
            totals.add(metrics)
        norm = self._apply()
        self._steps += 1
        return {**totals.over_ranks(self.device), "gradient_norm": norm, "learning_rate": rate}

    def _apply(self) -> float:
        """Clip and apply the gradients; the global norm they had before clipping."""
        if self._manual:
            assert self._optimizer_config is not None
            parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
            norm = float(nn.utils.clip_grad_norm_(parameters, self._optimizer_config.max_gradient_norm))
            if math.isfinite(norm):
                self._engine.step()
        else:
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise StageError(
                f"optimizer step {self._steps}: the gradient is not finite, weights are unchanged; lower the learning "
                "rate, or look at the metrics of the steps before for a loss that runs away"
            )
        return norm

    def forward(self, micro_batches: Sequence[B], function: Callable[[nn.Module, B], R]) -> list[R]:
        """`function(model, micro_batch)` of each micro-batch in eval mode, without gradients; nothing is reduced."""
        self._require_same_count(len(micro_batches))
        self._engine.eval()
        with torch.no_grad():
            return [function(self._engine, micro_batch.to(self.device)) for micro_batch in micro_batches]

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """On rank 0 the whole weights as CPU tensors, under the names of the wrapped HF model; None on other ranks.

        Weights that are tied appear once. A PeftModel gives its adapter alone, under the names of an adapter folder.
        """
        model = self.module.model
        assert isinstance(model, nn.Module)
        wanted = {
            name: p for name, p in model.named_parameters() if p.requires_grad or not isinstance(model, PeftModel)
        }
        tensors = {name: tensor for name, p in wanted.items() if (tensor := self._gathered(p)) is not None}
        if dist.get_rank() != 0:
            return None
        if isinstance(model, PeftModel):
            return adapter_state(model, tensors)
        tensors.update({name: b.detach().cpu().clone() for name, b in _persistent_buffers(model)})
        return tensors

    def _gathered(self, parameter: nn.Parameter) -> Tensor | None:
        """A copy of the whole parameter on rank 0's CPU; one parameter at a time, so that it fits."""
        if not hasattr(parameter, "ds_id"):
            return parameter.detach().cpu().clone() if dist.get_rank() == 0 else None
        deepspeed = _import_deepspeed()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone() if dist.get_rank() == 0 else None

    def _require_same_count(self, count: int) -> None:
        """Ranks that run different numbers of forwards would wait for each other for ever."""
        if self._size == 1:
            if count == 0:
                raise StageError("no micro-batches; use a filler on a rank that has no sequences")
            return
        counts = torch.tensor([count, -count], device=self.device)
        dist.all_reduce(counts, op=dist.ReduceOp.MIN)
        least, most = int(counts[0]), -int(counts[1])
        if least != most or least == 0:
            raise StageError(f"ranks have {least} to {most} micro-batches; all must have as many, and at least one")


def _import_deepspeed() -> Any:
    """DeepSpeed without its chatter; it reads the environment and prints while it is imported."""
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


def _build_optimizer(model: nn.Module, engine: EngineConfig, optimizer: OptimizerConfig) -> torch.optim.Optimizer:
    groups = parameter_groups(model, optimizer)
    options: dict[str, Any] = {"lr": optimizer.learning_rate, "betas": optimizer.betas}
    if not engine.offload_optimizer:
        return torch.optim.AdamW(groups, **options)
    _import_deepspeed()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    offloaded: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, **options, adamw_mode=True)
    return offloaded


def _zero_stage(engine: EngineConfig) -> int:
    """In bfloat16, stages 0 and 1 run as 2, which computes the same and shards more: DeepSpeed's stage 0 would sum the
    micro-batches' gradients in bfloat16, and its stage 1 goes through another optimizer that prints as it starts."""
    return max(2, engine.zero_stage) if engine.dtype == "bfloat16" else engine.zero_stage


def _settings(engine: EngineConfig, optimizer: OptimizerConfig | None, size: int, parameters: int) -> dict[str, Any]:
    stage = _zero_stage(engine)
    bucket = min(parameters, 500_000_000)  # elements; DeepSpeed would set its 500 million aside for any model
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if engine.offload_optimizer and optimizer is not None:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    settings: dict[str, Any] = {
        # The caller's micro-batches vary in number, and nothing is divided by a count: step() is the boundary, or, at
        # stage 0, the last backward.
        "managed_gradient_accumulation": stage == 0,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": size,
        "steps_per_print": 1 << 62,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    if engine.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"
    # Said even where it is 0: DeepSpeed clips at 1 unless told otherwise.
    settings["gradient_clipping"] = optimizer.max_gradient_norm if optimizer is not None and stage > 0 else 0.0
    return settings


def _wrong_dtype(model: nn.Module, engine: EngineConfig) -> bool:
    wanted = torch_dtype(engine.dtype)
    return any(p.is_floating_point() and p.dtype != wanted for p in model.parameters())


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    kept = set(model.state_dict(keep_vars=True))
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
