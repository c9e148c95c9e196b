"""Attention implementations of an architecture in transformers. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

# Every class has the eager one.
_FLAGS = {"sdpa": "_supports_sdpa", "flex": "_supports_flex_attn", "flash_attention_2": "_supports_flash_attn"}


def attentions_of(model_class: type) -> list[str]:
    """Return the values of engine.attention that transformers' class supports."""
    return ["eager", *(name for name, flag in _FLAGS.items() if getattr(model_class, flag))]


def attention_problem(model_class: str, attentions: Collection[str], attention: str) -> str | None:
    """Return the reason why a model of this class cannot be trained with engine.attention `attention`; None if it can.

    attentions: as listed by `attentions_of`.
    """
    if attention in attentions:
        return None
    other = "sdpa" if "sdpa" in attentions else "eager"
    return f"transformers has no attention `{attention}` for {model_class}: set engine.attention: {other}"
