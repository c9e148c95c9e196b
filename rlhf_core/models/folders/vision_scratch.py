"""A small randomly initialised Idefics3: the text model of scratch.py, a vision encoder and their processor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config.stages.base_model import ScratchModel, ScratchVision

if TYPE_CHECKING:
    import transformers


def vision_model(
    source: ScratchModel, vision: ScratchVision, text: dict[str, Any], image_token_id: int
) -> transformers.PreTrainedModel:
    """Build the model. text: the config of its text model, a Llama."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    config = Idefics3Config(
        image_token_id=image_token_id,
        tie_word_embeddings=source.tie_word_embeddings,
        scale_factor=vision.scale_factor,
        text_config={**text, "model_type": "llama"},
        vision_config={
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_hidden_layers": vision.layers,
            "num_attention_heads": vision.heads,
            "initializer_range": source.initializer_range,
        },
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    return Idefics3ForConditionalGeneration(config)


def save_processor(vision: ScratchVision, tokenizer: Any, folder: Path) -> None:
    """Save the tokenizer, and a processor that resizes images to one tile each."""
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    edge = {"longest_edge": vision.image_size}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, size=edge, max_image_size=edge)
    Idefics3Processor(images, tokenizer, image_seq_len=vision.tokens).save_pretrained(folder)
