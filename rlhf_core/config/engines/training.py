"""Settings of DeepSpeed and transformers for one model: precision, attention, sharding, offload."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_core.config.base import Config, Dtype, formerly_keyed, operational, since_default
from rlhf_core.config.engines.passed import PassedToDeepSpeed
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.numbers import MicroBatchTokens, PartitionSize, Processes, no_bool, no_number

GradientCheckpointing = Annotated[Literal[False, True, "selective"], BeforeValidator(no_number)]

_TOKENS_ON_GPU = 16384
_TOKENS_ON_CPU = 2048  # more take memory, and were slower where it was measured
LARGEST_BUCKET = 500_000_000  # gradients that ranks reduce together, as by default of DeepSpeed

# Settings whose ranks make up a replica together; equal for all models on the same workers.
SHARED_BY_RANKS = ("sequence_parallel", "tensor_parallel")


class EngineConfig(Config):
    """Settings of DeepSpeed and transformers for a model. Precision and attention change results, sharding only
    rounding.
    """

    dtype: Dtype = Field(default="bfloat16", description="dtype of weights and activations; master weights are float32")
    attention: Literal["sdpa", "eager", "flex", "flash_attention_2"] = Field(
        default="sdpa",
        description="attention implementation; the last two need a GPU. flex: torch's FlexAttention, one compiled call "
        "for a whole micro-batch, whose first ones take longer (not run on a GPU yet)",
    )
    zero_stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(no_bool)] = formerly_keyed(
        2, description="DeepSpeed's sharding over the workers: 1 optimizer, 2 also gradients, 3 also weights"
    )
    offload_optimizer: bool = operational(
        False, description="keep the optimizer's state in main memory; needs a zero_stage of 1, 2 or 3"
    )
    offload_parameters: bool = operational(
        False, description="keep the weights in main memory too, except those of the current layer; needs zero_stage 3"
    )
    overlap_comm: bool = operational(
        False, description="reduce gradients during the backward pass; needs sharding by zero_stage 2 or 3"
    )
    hpz_partition_size: PartitionSize | None = operational(
        None,
        description="ranks, neighbours such as those of a node, that share a second copy of the weights, from which "
        "the backward pass gathers them (hpZ of ZeRO++, arXiv:2306.10209); needs zero_stage 3",
    )
    gradient_checkpointing: GradientCheckpointing = operational(
        False,
        description="recompute activations instead of keeping them; selective: except the results of matrix products "
        "and attention, which take half of the memory and most of the time (needs a zero_stage below 3)",
    )
    compiled: bool = Field(
        default=False,
        description="compile the model's layers with torch: faster steps, the first ones minutes longer; changes "
        "rounding, and needs a zero_stage below 3",
    )
    sequence_parallel: Processes = operational(
        1, description="number of workers that share the tokens of each batch, for sequences longer than a device holds"
    )
    tensor_parallel: Processes = operational(
        1,
        description="number of workers that share the weights of each layer, for models larger than a device holds; "
        "needs a zero_stage below 3",
    )
    freeze_vision: bool = since_default(False, description="freeze the vision encoder of a model that reads images")
    tokens_per_micro_batch: MicroBatchTokens | None = operational(
        None,
        description=f"packed tokens of one forward; none: {_TOKENS_ON_GPU} on GPUs, {_TOKENS_ON_CPU} on CPUs, times "
        "sequence_parallel",
    )
    deepspeed: PassedToDeepSpeed = since_default({}, description="further settings of DeepSpeed, by its own names")

    def micro_batch_tokens(self, placement: Placement) -> int:
        """Return the packed tokens of one forward on workers of this placement."""
        of_a_worker = _TOKENS_ON_GPU if placement.gpus_per_worker else _TOKENS_ON_CPU
        return self.tokens_per_micro_batch or of_a_worker * self.sequence_parallel

    @property
    def sharding(self) -> int:
        """The ZeRO stage in effect. In bfloat16, 0 and 1 run as 2, which computes the same and shards more: DeepSpeed's
        stage 0 would sum the micro-batches' gradients in bfloat16, and its stage 1 takes another code path that
        prints as it starts.
        """
        return max(2, self.zero_stage) if self.dtype == "bfloat16" else self.zero_stage

    @model_validator(mode="after")
    def _attention_runs(self) -> EngineConfig:
        if self.attention == "flash_attention_2" and self.dtype == "float32":
            raise ValueError("attention flash_attention_2 computes in bfloat16 only, but dtype is float32; use sdpa")
        return self

    @model_validator(mode="after")
    def _flex_was_tested(self) -> EngineConfig:
        if self.attention != "flex":
            return self
        if self.compiled:
            raise ValueError("attention flex was not tested in compiled layers; remove `compiled`, or set sdpa")
        if self.tensor_parallel > 1:
            raise ValueError("attention flex was not tested with weights that workers share (tensor_parallel); set "
                             "sdpa")  # fmt: skip
        if self.gradient_checkpointing == "selective":
            raise ValueError("attention flex was not tested with gradient_checkpointing selective; set true, or sdpa")
        return self

    @model_validator(mode="after")
    def _can_share_tokens(self) -> EngineConfig:
        if self.sequence_parallel > 1 and self.attention != "sdpa":
            raise ValueError(
                f"sequence_parallel exchanges tokens in the attention sdpa, but attention is {self.attention}; set sdpa"
            )
        if self.sequence_parallel > 1 and self.compiled:
            raise ValueError(
                "compiled layers were not tested with tokens that workers share (sequence_parallel); remove one"
            )
        return self

    @model_validator(mode="after")
    def _can_share_weights(self) -> EngineConfig:
        if self.tensor_parallel == 1:
            return self
        if self.zero_stage == 3:
            raise ValueError("tensor_parallel divides the weights that zero_stage 3 would divide once more, which was "
                             "not tested; set zero_stage 2")  # fmt: skip
        if self.compiled:
            raise ValueError(
                "compiled layers were not tested with weights that workers share (tensor_parallel); remove one"
            )
        if self.attention == "flash_attention_2":
            raise ValueError("attention flash_attention_2 does not run in main memory, where a model is read before "
                             "workers share its weights (tensor_parallel); set sdpa")  # fmt: skip
        if self.gradient_checkpointing == "selective":
            raise ValueError("gradient_checkpointing selective keeps sums of workers that share weights "
                             "(tensor_parallel), which are then summed once more; set true")  # fmt: skip
        return self

    @property
    def ranks_of_replica(self) -> int:
        """The number of workers that compute one replica of the model together."""
        return self.sequence_parallel * self.tensor_parallel

    @model_validator(mode="after")
    def _can_compile(self) -> EngineConfig:
        if self.compiled and self.zero_stage == 3:
            raise ValueError("compiled layers cannot have their weights gathered, which zero_stage 3 does; set 2, or "
                             "remove `compiled`")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _can_checkpoint(self) -> EngineConfig:
        if self.gradient_checkpointing != "selective":
            return self
        if self.compiled:
            raise ValueError("gradient_checkpointing selective is not for compiled layers, which choose what they "
                             "keep; remove one of them")  # fmt: skip
        if self.zero_stage == 3:
            raise ValueError("gradient_checkpointing selective is checked on the model, which cannot be done where "
                             "zero_stage 3 shards its weights; set true")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _can_offload(self) -> EngineConfig:
        if self.offload_optimizer and self.sharding == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3; set one of them")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError("offload_parameters needs zero_stage 3; set it, or leave the weights where they are")
        return self

    @model_validator(mode="after")
    def _has_what_zero_needs(self) -> EngineConfig:
        if self.overlap_comm and self.sharding < 2:
            raise ValueError("overlap_comm needs zero_stage 2 or 3, which reduce gradients during the backward pass; "
                             "set one of them")  # fmt: skip
        if self.hpz_partition_size is not None and self.zero_stage != 3:
            raise ValueError("hpz_partition_size needs zero_stage 3, which shards the weights; set it")
        return self
