"""Models of any causal architecture of transformers, as small as its config class allows, with all kinds of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_LAYERS = 4
_MOST_PARAMETERS = 20_000_000

# Settings of any config that has them.
_SMALL: Mapping[str, Any] = {
    "vocab_size": 61, "vocab_size_per_layer_input": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim", "lru_width",
        "input_embedding_size", "output_embedding_size", "word_embed_proj_dim", "attention_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks",
        "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
        "decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads",
        "num_encoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_size", "attention_head_dim", "dim_head", "d_head",
        "swa_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "dim_ff",
        "ffn_hidden_size", "d_inner", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
        "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "router_hidden_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length",
        "max_target_positions", "model_max_length"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group",
        "num_expert_group", "encoder_layers", "num_encoder_layers", "first_k_dense_replace", "num_dense_layers",
        "moe_layer_start_index"), 1),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "zero_expert_num"), 2),
    "moe_layer_end_index": _LAYERS - 1, "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2,
    "qk_rope_head_dim": 4, "index_head_dim": 8, "index_n_heads": 24, "laurel_rank": 8, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0, "num_nextn_predict_layers": 0, "d_rel": 4, "rel_extent": 16, "hc_lowrank": 8,
    "rescale_every": 0, "adapter_rank": 4,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "time_step_rank", "mamba_dt_rank",
        "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16), "mamba_d_ssm": 64,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim", "linear_value_head_dim",
        "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1), "linear_num_key_heads": 2,
}  # fmt: skip

# Sizes that matter only in longer sequences, or further into a row: short for the oracle, and the class's own size
# for the check.
_SHORT: Mapping[str, int] = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size",
        "keep_window_size"), 6),
    "local_attention": 12, "attention_chunk_size": 5, "index_topk": 4, "index_block_size": 4, "index_topk_blocks": 1,
    "mamba_chunk_size": 8, "chunk_size": 8, "block_size": 8, "indexer_budget": 4, "floor_scale": 4,
}  # fmt: skip

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN4 = {
    "ngram_vocab_size_base": 50, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 1, "ple_layer_ids": [1],
    "ple_embed_dim": 32, "indexer_n_heads": 24, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip
# Settings of one class alone. With None: the class's own default.
_ONE: Mapping[str, Mapping[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE | {"mrope_section": [2, 1, 1]}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], _LAYERS // 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 16, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
        },
        "original_max_position_embeddings": 16,
    },
    "qwen4_exp": _QWEN4, "qwen4_exp_text": _QWEN4,
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def small_config(model_type: str, *, short: bool = True, **changes: Any) -> Any:
    """Return the config of a model of this type with small sizes. short: also those in _SHORT."""
    text = type(CONFIG_MAPPING[model_type]().get_text_config())
    defaults = text().to_dict()
    names = {*defaults, *getattr(text, "__dataclass_fields__", ()), *getattr(text, "attribute_map", ())}
    settings = {name: value for name, value in {**_SMALL, **(_SHORT if short else {})}.items() if name in names}
    settings |= {name: 0.0 for name, value in defaults.items() if isinstance(value, float) and _is_random(name)}
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types"):
        if defaults.get(name):
            kinds = list(dict.fromkeys(defaults[name]))
            settings[name] = (kinds * _LAYERS)[: max(_LAYERS, len(kinds))]
    if "kv_lora_rank" in names:  # latent attention has the sizes of its parts, and a key for each query
        settings |= {"head_dim": settings["qk_rope_head_dim"], "num_key_value_heads": settings["num_attention_heads"]}
    config = text(**{**settings, **_ONE.get(model_type, {}), **changes})
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def _is_random(name: str) -> bool:
    return "drop" in name or "jitter" in name


def small_model(config: Any, *, dtype: torch.dtype = torch.float32) -> Any:
    """Build a model with random weights that are large enough for every layer to matter."""
    with torch.device("meta"):
        skeleton = _causal(config)
    if (size := sum(parameter.numel() for parameter in skeleton.parameters())) > _MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f}M parameters with small settings")
    torch.manual_seed(0)
    model = _causal(config)
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.25 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    return model.to(dtype).eval()


def _causal(config: Any) -> Any:
    try:
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError:
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
