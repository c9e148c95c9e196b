"""Settings that a recipe passes on to DeepSpeed and vLLM under their own names, and those that it may not pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationError
from pydantic_core import InitErrorDetails

from rlhf_core.config.base import Config, configs_below, raised


@dataclass(frozen=True, slots=True)
class Library:
    """Marks a setting whose content is passed on to a library."""

    name: str
    module: str  # that is imported
    # "package.module:function" returns (dotted name, problem) of each setting that the library does not know or take;
    # loads the library.
    problems: str
    refused: Mapping[str, str] = field(repr=False)  # reason by dotted name

    def accept(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return `settings`. Raises ValidationError, located at each refused name."""
        problems = [
            InitErrorDetails(type=raised(reason), loc=place, input=value)
            for place, value in _named(settings, ())
            if (reason := self._reason(".".join(place), value)) is not None
        ]
        if problems:
            raise ValidationError.from_exception_data(self.name, problems)
        return settings

    def _reason(self, name: str, value: Any) -> str | None:
        if not isinstance(value, dict) and any(refused.startswith(f"{name}.") for refused in self.refused):
            return "it must be a mapping"  # true or null would set what is refused inside
        return self.refused.get(name)


def _named(settings: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in settings.items():
        yield (*at, name), value
        if isinstance(value, dict):
            yield from _named(value, (*at, name))


def passed_settings(config: Config) -> Iterator[tuple[str, Library, dict[str, Any]]]:
    """Yield the path, library and content of each setting below `config` that passes something on."""
    for at, part in configs_below(config):
        for name, setting in part.used_settings():
            info = type(part).model_fields.get(name)
            library = next((mark for mark in info.metadata if isinstance(mark, Library)), None) if info else None
            if library is not None and setting:
                yield f"{at}.{name}".removeprefix("."), library, setting


def _set_by(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: f"the recipe sets it: use {setting}" for name, setting in settings.items()}


def _because(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_ZERO = "zero_optimization"

DEEPSPEED = Library(
    "DeepSpeed", "deepspeed", "rlhf_core.training.deepspeed_passed:problems",
    {
        **_set_by({
            f"{_ZERO}.stage": "`engine.zero_stage`",
            f"{_ZERO}.overlap_comm": "`engine.overlap_comm`",
            f"{_ZERO}.zero_hpz_partition_size": "`engine.hpz_partition_size`",
            **dict.fromkeys(
                (f"{_ZERO}.offload_optimizer", f"{_ZERO}.cpu_offload", f"{_ZERO}.cpu_offload_use_pin_memory"),
                "`engine.offload_optimizer`",
            ),
            **dict.fromkeys((f"{_ZERO}.offload_param", f"{_ZERO}.cpu_offload_param"), "`engine.offload_parameters`"),
            **dict.fromkeys(
                (
                    "fp16", "bf16", "bfloat16", "data_types", "torch_autocast", "communication_data_type",
                    "seq_parallel_communication_data_type",
                ),
                "`engine.dtype`",
            ),
            "activation_checkpointing": "`engine.gradient_checkpointing`",
            "gradient_clipping": "`optimizer.max_gradient_norm`",
            **dict.fromkeys(("optimizer", "scheduler"), "`optimizer`"),
            **dict.fromkeys(("checkpoint", "datastates_ckpt"), "`checkpoint`"),
            **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), "`tracking`"),
        }),
        **_because(
            "steps are divided into micro-batches by tokens, and the sum of their gradients must not depend on it",
            "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
            "gradient_allreduce_op gradient_predivide_factor prescale_gradients sparse_gradients",
        ),
        **_because(
            "the ranks of a replica are a mesh of the recipe's, which DeepSpeed would divide once more",
            "tensor_parallel expert_parallel pipeline use_data_before_expert_parallelism sequence_parallel_size",
        ),
        **_because(
            "DeepSpeed's optimizers on CPUs are compiled at the first start, and are not faster than torch's",
            "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        ),
        **_because(
            "it replaces the forward and the gathering of weights, which publishes, checkpoints and the check of "
            "layouts rely on; `engine.compiled` compiles the layers",
            "compile hybrid_engine",
        ),
        **_because(
            "rounded weights would not be those that are published and proven, and rounded gradients would depend on "
            "the number of ranks",
            f"{_ZERO}.zero_quantized_weights {_ZERO}.zero_quantized_nontrainable_weights "
            f"{_ZERO}.zero_quantized_gradients weight_quantization",
        ),
        **_because(
            "updates would be applied later than the step that they are of, which no checkpoint could restore",
            f"{_ZERO}.zenflow",
        ),
        **_because("the norm of the gradient decides whether an update is skipped", f"{_ZERO}.compute_grad_norm"),
        **_because(
            "DeepSpeed then reads the float32 weights back under wrong names, as for EMA and the best weights",
            f"{_ZERO}.round_robin_gradients",
        ),
        **_because(
            "the forward fails with it: modules are gathered whole, whose weights are also used one by one",
            f"{_ZERO}.stage3_module_granularity_threshold {_ZERO}.module_granularity_threshold",
        ),
        **_because("which rows are read is up to `data`", "data_efficiency dataloader_drop_last"),
        **_because(
            "checkpoints are ours, and hold each tensor that the next step depends on",
            f"{_ZERO}.elastic_checkpoint {_ZERO}.pipeline_loading_checkpoint "
            f"{_ZERO}.save_muon_momentum_buffer_in_memory {_ZERO}.load_from_fp32_weights",
        ),
        **_because("it would print in every step; metrics are in `tracking`", "steps_per_print"),
        **_because("it starts many trials of its own launcher", "autotuning"),
    },
)  # fmt: skip

_VIEW_OF_MODEL = "the engine serves the model of its stage, as it is"
_OWN_CODE = "code outside of the recipe is in no key"
_PLACED = "the recipe places engines; an engine over several GPUs has rollout.tensor_parallel_size"
_OTHER_WEIGHTS = "the engine must compute with the published weights, which the proof reads back"
_OTHER_SAMPLES = "samples and log-probs must be those of the policy"
_OLDER_CACHE = "keys and values would outlive the weights that they were computed with"
_ADAPTERS = "`lora` of the stage sets all of the adapter's settings"
_SAME_IMAGES = "images must be read as in training"

VLLM = Library(
    "vLLM", "vllm", "rlhf_core.rollout.vllm.passed:problems",
    {
        **_set_by({
            "dtype": "`engine.dtype`",
            "seed": "`seed`",
            "max_model_len": "`rollout.max_length`",
            "max_num_seqs": "`rollout.max_sequences`",
            "tensor_parallel_size": "`rollout.tensor_parallel_size`",
            "pipeline_parallel_size": "`rollout.pipeline_parallel_size`",
            "gpu_memory_utilization": "`rollout.memory_share`",
            **dict.fromkeys(("kv_cache_memory_bytes", "num_gpu_blocks_override"), "`rollout.cpu_cache_gib`"),
            "enable_prefix_caching": "`rollout.prefix_caching`",
            "enforce_eager": "`rollout.compiled`",
            "limit_mm_per_prompt": "`rollout.max_images`",
            "attention_backend": "`rollout.vllm.attention_config: {backend: …}`",
            **dict.fromkeys(("generation_config", "override_generation_config"), "`sampling`"),
            **dict.fromkeys(
                (
                    "enable_sleep_mode", "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names",
                    "enable_cumem_allocator", "enable_nccl_comm_suspend",
                ),
                "`rl.hybrid`",
            ),
            "weight_transfer_config": "`rollout.transport`",
        }),
        **_because(
            _VIEW_OF_MODEL,
            "model model_weights served_model_name tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init "
            "hf_config_path config_format revision code_revision hf_token download_dir runner convert pooler_config "
            "enable_prompt_embeds tokens_only hf_overrides",
        ),
        **_because(
            _OWN_CODE,
            "trust_remote_code model_class_overrides worker_cls scheduler_cls logits_processors io_processor_plugin "
            "reasoning_parser_plugin additional_config",
        ),
        **_because(
            _OTHER_WEIGHTS,
            "worker_extension_cls quantization quantization_config allow_deprecated_quantization load_format "
            "model_loader_extra_config ignore_patterns pt_load_map_location offload_backend cpu_offload_gb "
            "cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params "
            "enable_ep_weight_filter enable_eplb eplb_config mm_encoder_only language_model_only",
        ),
        **_because(
            _OTHER_SAMPLES,
            "logprobs_mode max_logprobs kv_cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype "
            "mamba_ssm_cache_dtype enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds "
            "disable_sliding_window swa_bounded_replay kv_sharing_fast_prefill speculative_config spec_method "
            "spec_model spec_tokens watermark_config diffusion_config structured_outputs_config reasoning_parser "
            "reasoning_config",
        ),
        **_because(_OLDER_CACHE, "kv_transfer_config kv_events_config ec_transfer_config kv_offloading_size "
                                 "kv_offloading_backend prefix_cache_retention_interval"),
        **_because(
            "a new version of the weights is taken between two forwards, and tokens are told apart by it",
            "async_scheduling stream_interval",
        ),
        **_because("on CPU vLLM fails at a prompt that is split if its request has a seed", "enable_chunked_prefill"),
        **_because(
            _PLACED,
            "distributed_executor_backend master_addr master_port nnodes node_rank device_ids data_parallel_size "
            "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
            "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
            "data_parallel_multi_port_external_lb data_parallel_backend prefill_context_parallel_size "
            "decode_context_parallel_size enable_expert_parallel enable_elastic_ep elastic_ep_max_dp_size "
            "fault_tolerance_config enable_fault_tolerance ray_workers_use_nsight",
        ),
        **_because(
            _ADAPTERS,
            "enable_lora max_loras max_lora_rank lora_dtype lora_target_modules default_mm_loras fully_sharded_loras "
            "max_cpu_loras enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
            "enable_moe_shared_loras max_lora_cls_labels",
        ),
        **_because(
            _SAME_IMAGES,
            "mm_processor_kwargs media_io_kwargs mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
            "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings enable_mm_embeds "
            "video_pruning_rate video_pruning_method mm_device_do_normalize mm_processor_device "
            "allowed_local_media_path allowed_media_domains",
        ),
        **_because("figures of an engine are in the stage's metrics", "disable_log_stats"),
    },
)  # fmt: skip

PassedToDeepSpeed = Annotated[dict[str, Any], DEEPSPEED, AfterValidator(DEEPSPEED.accept)]
PassedToVllm = Annotated[dict[str, Any], VLLM, AfterValidator(VLLM.accept)]
