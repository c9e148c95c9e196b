"""One rank of a model under DeepSpeed: optimizer steps over any number of micro-batches, and plain forwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.errors import StageError
from rlhf_core.mesh import current_mesh
from rlhf_core.metrics import Metric, merged
from rlhf_core.models.dropout import set_train_mode
from rlhf_core.models.loading import torch_dtype
from rlhf_core.models.packed import PackedModel
from rlhf_core.models.sharded_loading import full_shape
from rlhf_core.models.stored import stored_layout
from rlhf_core.training.deepspeed_layouts import layouts
from rlhf_core.training.deepspeed_offload import offload_states, reload_states
from rlhf_core.training.deepspeed_passed import problems
from rlhf_core.training.deepspeed_settings import deepspeed_settings, import_deepspeed
from rlhf_core.training.deepspeed_state import DeepSpeedState
from rlhf_core.training.deepspeed_tensor import SharedLayers, clip_gradients
from rlhf_core.training.deepspeed_weights import master_weights, replaced, stored_weights
from rlhf_core.training.engine import B, LossFunction, R, StepCounters
from rlhf_core.training.metrics import MetricTotals, StepMetrics
from rlhf_core.training.muon import Muon
from rlhf_core.training.optimizers import build_optimizer, learning_rate
from rlhf_core.training.randomness import torch_random_state
from rlhf_core.training.state import RankState

_COUNTERS = "counters"


class DeepSpeedEngine:
    """Implements training.engine.TrainingEngine, with weights and optimizer sharded over the ranks by ZeRO.

    The process group must exist (training.distributed.join_group). bfloat16 means bfloat16 weights and activations over
    float32 master weights and gradient sums.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        engine: EngineConfig,
        optimizer: OptimizerConfig | None,
        total_steps: int,
        dropout: bool = True,
    ) -> None:
        """optimizer None: a frozen model, forwards only. total_steps: optimizer steps of the whole schedule.
        dropout: as configured in the model and its adapter; False: updates compute the same as forwards."""
        if not dist.is_initialized():
            raise RuntimeError("call rlhf_core.training.distributed.join_group before building an engine")
        self.module = model
        self._config = engine
        self._optimizer_config = optimizer
        self._total_steps = total_steps
        self._dropout = dropout
        self.counters = StepCounters()
        self.mesh = current_mesh()
        # Without ZeRO, DeepSpeed clips but does not report the norm, so the reduced gradients are clipped here.
        self._manual = engine.sharding == 0
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.optimizer = None if optimizer is None else build_optimizer(model, engine, optimizer)
        self._engine = self._start(model)
        self._offloaded: list[Tensor] | None = None  # the tensors moved by `offload`; None: not offloaded
        if isinstance(model, PackedModel):
            self._check_layouts(model)

    def _check_layouts(self, model: PackedModel) -> None:
        """Run the check as a forward of the engine, in which DeepSpeed gathers weights."""
        self._engine.eval()
        selective = self._config.gradient_checkpointing == "selective" and self._optimizer_config is not None
        model.forward = partial(model.check_layouts, self.device, compiled=self._config.compiled, selective=selective)
        try:
            self._engine()
        finally:
            del model.forward

    @property
    def is_trained(self) -> bool:
        return self.optimizer is not None

    @property
    def shares_prompts(self) -> bool:
        return isinstance(self.module, PackedModel) and self.module.shares_prompts

    def _start(self, model: nn.Module) -> Any:
        """Return DeepSpeed's engine, or the bare module if it is neither trained nor divided over ranks."""
        if self._optimizer_config is None:
            model.requires_grad_(False)
            if self._config.zero_stage < 3:
                dtype = torch_dtype(self._config.dtype) if _wrong_dtype(model, self._config) else None
                if self.mesh.tensor == 1:
                    return model.to(self.device, dtype)
                model.to(dtype=dtype)  # DeepSpeed moves it, once it is cut
        if self._config.deepspeed and (wrong := problems(self._config.deepspeed)):
            raise StageError("; ".join(f"engine.deepspeed.{name}: {problem}" for name, problem in wrong))
        deepspeed = import_deepspeed()
        shared = SharedLayers.of(model) if self.mesh.tensor > 1 else None
        trained = sum(full_shape(p).numel() for p in model.parameters() if p.requires_grad)
        settings = deepspeed_settings(
            self._config, self._optimizer_config, trained if shared is None else shared.num_parameters
        )
        if shared is not None:
            settings["tensor_parallel"] = shared.settings()
        if self._config.zero_stage == 3:
            for buffer in model.buffers():  # by itself DeepSpeed leaves those of a divided model where they are
                buffer.data = buffer.data.to(self.device)
        started, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=settings)
        if shared is not None:
            shared.adopt(started)
        if self._manual and self.mesh.size == 1:
            started.enable_backward_allreduce = False  # with one rank it would only copy all gradients
        if isinstance(self.optimizer, Muon) and not self._manual:
            self.optimizer.layouts = layouts(started.optimizer, self._config.sharding)
        return started

    def step(self, micro_batches: Sequence[B], loss: LossFunction[B]) -> StepMetrics:
        if self._optimizer_config is None:
            raise RuntimeError("this engine was built without an optimizer")
        self._require_same_count(len(micro_batches))
        self._engine.train()
        set_train_mode(self.module, dropout=self._dropout)
        rate = learning_rate(self._optimizer_config, self.counters.steps, self._total_steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        totals = MetricTotals()
        for i, host_batch in enumerate(micro_batches):
            micro_batch = host_batch.to(self.device)
            if self._manual:
                self._engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            with nullcontext() if self._dropout else self._no_random_numbers():
                value, metrics = loss(self._engine, micro_batch)
            # DeepSpeed averages over ranks, but the update needs the sum over replicas.
            self._engine.backward(value * self.mesh.data)
            totals.add(metrics, micro_batch.loss_mask.sum())
        norm = self._apply()
        self.counters = self.counters.after(applied=math.isfinite(norm))
        self._require_progress()
        means, maxima = totals.over_replicas(self.device)
        return StepMetrics(norm, rate, not math.isfinite(norm), means, maxima, totals.num_tokens)

    @contextmanager
    def _no_random_numbers(self) -> Iterator[None]:
        """Raise StageError if the model draws random numbers: eval mode leaves some dropout or noise on."""
        before = torch_random_state()
        yield
        if any(not old.equal(new) for old, new in zip(before, torch_random_state(), strict=True)):
            raise StageError(
                f"{type(self._wrapped).__name__} draws random numbers even in eval mode, so its updates would be of "
                "another policy than the one that sampled; set `dropout: true` to train with them"
            )

    def _apply(self) -> float:
        """Clip and apply the gradients if they are finite; returns their global norm before clipping."""
        assert self._optimizer_config is not None
        if not self._manual:
            self._engine.step()  # skips an update that is not finite, on all ranks
            return float(self._engine.get_global_grad_norm())
        trained = [p for group in self._engine.optimizer.param_groups for p in group["params"]]
        parameters = [p for p in trained if p.grad is not None]
        longest = self._optimizer_config.max_gradient_norm
        norm = clip_gradients(parameters, math.inf if longest is None else longest, self.mesh)
        if math.isfinite(norm):
            self._engine.step()
        else:
            for parameter in parameters:
                parameter.grad = None
        return norm

    def _require_progress(self) -> None:
        assert self._optimizer_config is not None
        if self.counters.skipped_in_a_row >= self._optimizer_config.max_skipped_updates:
            raise StageError(
                f"{self.counters.skipped_in_a_row} updates in a row were skipped, the last at optimizer step "
                f"{self.counters.steps - 1}: their gradient was not finite; weights are as before them. Lower the "
                "learning rate, or look at the metrics of the steps before for a loss that runs away"
            )

    def forward(self, micro_batches: Sequence[B], function: Callable[[nn.Module, B], R]) -> list[R]:
        self._require_same_count(len(micro_batches))
        self._engine.eval()
        with torch.no_grad():
            return [function(self._engine, micro_batch.to(self.device)) for micro_batch in micro_batches]

    def measure(
        self, micro_batches: Sequence[B], metrics: Callable[[nn.Module, B], Mapping[str, Metric]]
    ) -> dict[str, float]:
        totals = MetricTotals()
        for micro_batch, reported in zip(micro_batches, self.forward(micro_batches, metrics), strict=True):
            totals.add(reported, micro_batch.num_trained_tokens)
        return merged(*totals.over_replicas(self.device))

    def total(self, micro_batches: Sequence[B], function: Callable[[nn.Module, B], Tensor]) -> Tensor:
        return self.mesh.reduce(torch.stack(self.forward(micro_batches, function)).sum(0), over="data")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return stored_weights(self._wrapped)

    def weight_layout(self) -> dict[str, Tensor]:
        return stored_layout(self._wrapped)

    def master_weights(self) -> Iterator[tuple[str, Tensor]]:
        return master_weights(self._wrapped, zero_stage=self._config.sharding)

    def replaced(self, weights: Iterable[tuple[str, Tensor]]) -> AbstractContextManager[None]:
        return replaced(self._wrapped, weights)

    def state(self) -> RankState:
        """Return references to the live tensors.

        Under ZeRO 1 and 2 every rank has the full weights and its partition of the rest, under ZeRO 3 a partition of
        everything; without ZeRO, everything is equal on all ranks, except parts of weights that ranks share.
        """
        live = self._state.live()
        return replace(live, shared={_COUNTERS: torch.tensor(astuple(self.counters)), **live.shared})

    def load_state(self, state: RankState) -> None:
        saved = {**state.shared, **state.own}
        counters: list[int] = saved.pop(_COUNTERS).tolist()
        self._state.load(saved)
        self.counters = StepCounters(*counters)

    @property
    def _state(self) -> DeepSpeedState:
        assert self.optimizer is not None
        return DeepSpeedState(self.module, self.optimizer, self._engine.optimizer)

    @property
    def _wrapped(self) -> nn.Module:
        model = self.module.model
        assert isinstance(model, nn.Module)
        return model

    def offload(self) -> None:
        if self._offloaded is None:
            self._offloaded = offload_states(self._engine)

    def reload(self) -> None:
        if self._offloaded is not None:
            reload_states(self._engine, self._offloaded, self.device)
            self._offloaded = None

    def _require_same_count(self, count: int) -> None:
        """Raise StageError unless all ranks have equally many micro-batches, at least one: they would deadlock."""
        if self.mesh.size == 1:
            if count == 0:
                raise StageError("no micro-batches; use a filler on a rank that has no sequences")
            return
        counts = self.mesh.reduce(torch.tensor([count, -count], device=self.device), dist.ReduceOp.MIN, over="all")
        least, most = int(counts[0]), -int(counts[1])
        if least != most or least == 0:
            raise StageError(f"ranks have {least} to {most} micro-batches; all must have as many, and at least one")


def _wrong_dtype(model: nn.Module, engine: EngineConfig) -> bool:
    wanted = torch_dtype(engine.dtype)
    return any(p.is_floating_point() and p.dtype != wanted for p in model.parameters())
