"""The shape of a model from scratch, a Llama. Loads no torch."""

from __future__ import annotations

from typing import Any

from rlhf_core.config.stages.base_model import ScratchModel
from rlhf_core.models.folders.targets import LANGUAGE_HEAD

VISION = "idefics3"  # the model_type of one with a vision encoder
_LINEAR = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def architecture(source: ScratchModel) -> dict[str, Any]:
    """Return the shape in its config.json, without the rows of the embedding."""
    return {
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_hidden_layers": source.layers,
        "num_attention_heads": source.heads,
        "num_key_value_heads": source.heads,
        "max_position_embeddings": source.context_length,
        "tie_word_embeddings": source.tie_word_embeddings,
    }


def linear_layers(source: ScratchModel) -> list[str]:
    """Return the paths of its linear layers; with a vision encoder, those of its text model."""
    part = "model" if source.vision is None else "model.text_model"
    return [*(f"{part}.layers.{index}.{name}" for index in range(source.layers) for name in _LINEAR), LANGUAGE_HEAD]
