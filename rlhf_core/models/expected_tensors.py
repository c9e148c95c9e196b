"""The tensors of the most common architectures, by config.json alone, so that weights are held against them before a
job. Loads no torch; a test compares with transformers' own. Others are compared by their class, models/weights.py."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from rlhf_core.models.headers import StoredTensor

Shape = tuple[int, ...]

KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_MOST_NAMED = 3  # tensors in a message
_BODY = "model."
_HEADS = ("lm_head.", "score.")
_BUFFER = "rotary_emb.inv_freq"  # of old checkpoints, which every class computes


def misfit(
    missing: Collection[str], unexpected: Collection[str], mismatched: Iterable[tuple[str, Shape, Shape]]
) -> str | None:
    """What is wrong with weights, in one sentence; None: nothing. mismatched: name, stored shape, expected shape."""
    parts = []
    if missing:
        parts.append(f"missing are {_some(missing)}")
    if unexpected:
        parts.append(f"{_some(unexpected)} belong to another model")
    shapes = [f"{name} ({_shape(stored)}, expected {_shape(shape)})" for name, stored, shape in mismatched]
    if shapes:
        parts.append(f"of another shape are {_some(shapes)}")
    return "; ".join(parts) or None


def is_known(settings: Mapping[str, Any]) -> bool:
    """settings: what `class_config` gives of a model."""
    return settings["model_type"] in KNOWN_TYPES and "text_config" not in settings


def tensor_problem(
    settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor], *, reward_model: bool
) -> str | None:
    """How the stored tensors differ from those of the model that `class_config` gives as `settings`; None: they do not,
    or its architecture is none of KNOWN_TYPES."""
    if not is_known(settings):
        return None
    expected = dict(_expected(settings, reward_model=reward_model))
    has_body = any(name.startswith(_BODY) for name in tensors)
    stored: dict[str, Shape] = {}
    for name, tensor in tensors.items():
        without_body = not has_body and not name.startswith(_HEADS) and _BODY + name in expected  # it was saved alone
        if not name.endswith(_BUFFER):
            stored[_BODY + name if without_body else name] = tensor.shape
    may_be_there = {"lm_head.weight"} if settings.get("tie_word_embeddings") or reward_model else set()
    return misfit(
        expected.keys() - stored.keys(),
        stored.keys() - expected.keys() - may_be_there,
        [(name, stored[name], shape) for name, shape in expected.items() if name in stored and stored[name] != shape],
    )


def _expected(settings: Mapping[str, Any], *, reward_model: bool) -> Iterator[tuple[str, Shape]]:
    hidden, width, rows = settings["hidden_size"], settings["intermediate_size"], settings["vocab_size"]
    heads, kind = settings["num_attention_heads"], settings["model_type"]
    shared = settings.get("num_key_value_heads") or heads
    size = settings.get("head_dim") or hidden // heads
    linear = {
        "self_attn.q_proj": (heads * size, hidden), "self_attn.k_proj": (shared * size, hidden),
        "self_attn.v_proj": (shared * size, hidden), "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width),
    }  # fmt: skip
    norms = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    if kind == "qwen3":
        norms |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    attention = tuple(name for name in linear if name.startswith("self_attn."))
    biased: set[str] = set()
    if kind == "qwen2":
        biased = {name for name in attention if not name.endswith("o_proj")}
    elif kind != "mistral" and settings.get("attention_bias"):
        biased = {*attention}
    if kind == "llama" and settings.get("mlp_bias"):
        biased |= linear.keys() - {*attention}
    yield f"{_BODY}embed_tokens.weight", (rows, hidden)
    yield f"{_BODY}norm.weight", (hidden,)
    if reward_model:
        yield "score.weight", (1, hidden)
    elif not settings.get("tie_word_embeddings"):
        yield "lm_head.weight", (rows, hidden)
    for layer in range(settings["num_hidden_layers"]):
        for name, shape in (linear | norms).items():
            yield f"{_BODY}layers.{layer}.{name}.weight", shape
        for name in biased:
            yield f"{_BODY}layers.{layer}.{name}.bias", linear[name][:1]


def _some(names: Iterable[str]) -> str:
    known = sorted(names)
    rest = len(known) - _MOST_NAMED
    return ", ".join(known[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _shape(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "a single number"
