"""Small models of every architecture that reads images, from scratch, as the folders that people give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from rlhf_core.chat.tokenizers import ASSISTANT, BOS, CHAT_TEMPLATE, EOS, PAD, UNKNOWN, USER, word_level_tokenizer

WORDS = ("red", "blue")
CONTEXT = 256
# A text model of 2 layers. Its heads have size 32, which engines serve.
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "initializer_range": 0.05, "head_dim": 32,
}  # fmt: skip
ENCODER = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIDE, PATCH = 56, 14  # of a tile, in pixels


@dataclass(frozen=True)
class Made:
    config: Any
    tokenizer: Any
    images: Any  # transformers' image processor
    processor: dict[str, Any]  # processor_config.json


def tokenizer_with(
    marks: Mapping[str, str], *, around: tuple[str, str, str] = ("", "", ""), words: tuple[str, ...] = ()
) -> Any:
    """The word-level tokenizer with the marks of images, by their names in the processor. around: an image's token,
    and what the template writes before and after it.
    """
    plain = word_level_tokenizer((*WORDS, *words, *dict.fromkeys(marks.values())), CONTEXT)
    named = {"user_token": USER, "assistant_token": ASSISTANT, **marks}
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN,
        extra_special_tokens=named, model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    token, before, after = around
    written = f"message['content'] | replace('{token}', '{before}{token}{after}')" if token else "message['content']"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<user>{{ message['content'] }}", f"<user>{{{{ {written} }}}}")
    return tokenizer


def shared(tokenizer: Any) -> dict[str, Any]:
    """Settings of a text model."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**TEXT, **ids, "vocab_size": len(tokenizer), "tie_word_embeddings": False}


def _smolvlm() -> Made:
    marks = {
        "image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>",
    }  # fmt: skip
    tokenizer = tokenizer_with(marks)
    config = hf.SmolVLMConfig(
        image_token_id=tokenizer.image_token_id, tie_word_embeddings=False, scale_factor=2,
        text_config={**shared(tokenizer), "model_type": "llama"}, pad_token_id=tokenizer.pad_token_id,
        vision_config={**ENCODER, "image_size": SIDE, "patch_size": PATCH, "initializer_range": 0.05},
    )  # fmt: skip
    edge = {"longest_edge": SIDE}
    images = hf.SmolVLMImageProcessorPil(do_image_splitting=False, size=edge, max_image_size=edge)
    return Made(config, tokenizer, images, {"processor_class": "SmolVLMProcessor", "image_seq_len": 4})


def _qwen_tokens() -> tuple[Any, dict[str, int]]:
    """The tokenizer, and the ids in config.json."""
    marks = {
        "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    }  # fmt: skip
    tokenizer = tokenizer_with(marks, around=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"))
    return tokenizer, {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in marks}


# The pictures of the tests become grids of 1 × 1 and of 2 × 3 tokens; a window of the encoder has 2 × 2.
QWEN_ENCODER = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": PATCH, "out_hidden_size": 64,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.05,
}  # fmt: skip
QWEN_SIZES = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}


def _qwen_images() -> hf.Qwen2VLImageProcessorPil:
    return hf.Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, temporal_patch_size=2, size=QWEN_SIZES)


def _qwen2_5_vl() -> Made:
    tokenizer, ids = _qwen_tokens()
    positions = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = hf.Qwen2_5_VLConfig(
        **ids, tie_word_embeddings=False, text_config={**shared(tokenizer), "rope_parameters": positions},
        vision_config={**QWEN_ENCODER, "window_size": 56, "fullatt_block_indexes": [1]},
    )  # fmt: skip
    return Made(config, tokenizer, _qwen_images(), {"processor_class": "Qwen2_5_VLProcessor"})


def _qwen3_vl() -> Made:
    tokenizer, ids = _qwen_tokens()
    positions = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = hf.Qwen3VLConfig(
        **ids, tie_word_embeddings=False, text_config={**shared(tokenizer), "rope_parameters": positions},
        vision_config={**QWEN_ENCODER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    )  # fmt: skip
    return Made(config, tokenizer, _qwen_images(), {"processor_class": "Qwen3VLProcessor"})


def _gemma3() -> Made:
    marks = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = tokenizer_with(marks, words=tuple("\n" * count for count in (2, 3, 4)))
    config = hf.Gemma3Config(
        boi_token_index=tokenizer.boi_token_id, eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id, mm_tokens_per_image=4, tie_word_embeddings=False,
        text_config={
            **shared(tokenizer), "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 32,
        },
        vision_config={**ENCODER, "image_size": SIDE, "patch_size": PATCH},
    )  # fmt: skip
    images = hf.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return Made(config, tokenizer, images, {"processor_class": "Gemma3Processor", "image_seq_length": 4})


def _internvl() -> Made:
    marks = {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    tokenizer = tokenizer_with(marks)
    config = hf.InternVLConfig(
        image_token_id=tokenizer.context_image_token_id, image_seq_length=4, downsample_ratio=0.5,
        tie_word_embeddings=False, text_config={**shared(tokenizer), "model_type": "qwen2"},
        vision_config={**ENCODER, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
    )  # fmt: skip
    images = hf.GotOcr2ImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    return Made(config, tokenizer, images, {"processor_class": "InternVLProcessor", "image_seq_length": 4})


def _llava_onevision() -> Made:
    tokenizer = tokenizer_with({"image_token": "<image>", "video_token": "<video>"})
    sizes = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
    config = hf.LlavaOnevisionConfig(
        image_token_index=tokenizer.image_token_id, video_token_index=tokenizer.video_token_id,
        tie_word_embeddings=False, text_config={**shared(tokenizer), "model_type": "qwen2"},
        vision_config={**ENCODER, "model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": PATCH},
        image_grid_pinpoints=sizes,
    )  # fmt: skip
    images = hf.LlavaOnevisionImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=sizes)
    settings = {"num_image_tokens": (SIDE // PATCH) ** 2, "vision_feature_select_strategy": "full"}
    return Made(config, tokenizer, images, {"processor_class": "LlavaOnevisionProcessor", **settings})


BUILDERS: dict[str, Callable[[], Made]] = {
    "smolvlm": _smolvlm,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "gemma3": _gemma3,
    "internvl": _internvl,
    "llava_onevision": _llava_onevision,
}


def _name_as_on_the_hub(weights: Path, config: Any) -> None:
    """A SigLIP's layers are below `vision_model` there, and so vLLM reads them; transformers leaves this out of a new
    folder, and writes it for a model that was read with it.
    """
    if config.vision_config.model_type == "siglip_vision_model":
        tensors = load_file(weights)
        renamed = {re.sub("^vision_tower[.]", "vision_tower.vision_model.", name): tensors[name] for name in tensors}
        save_file(renamed, weights, metadata={"format": "pt"})


def vision_folder(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a model of this model_type, and return its folder."""
    made = BUILDERS[kind]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForImageTextToText.from_config(made.config)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():  # zero at first, such as biases, and Gemma 3's projection, which hides images
                    parameter.normal_(std=0.05)
    folder.mkdir(parents=True, exist_ok=True)
    torch.nn.Module.to(model, torch.float32)
    model.save_pretrained(folder)
    _name_as_on_the_hub(folder / "model.safetensors", model.config)
    made.images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(made.processor))
    made.tokenizer.save_pretrained(folder)
    return folder
