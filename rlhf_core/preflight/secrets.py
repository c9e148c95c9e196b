"""Detection of secrets in a recipe, which is kept with every result and shown in Prefect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rlhf_core.recipe.recipe import Recipe

_SECRET_KEY = re.compile(
    r"(^|[_-])(api_?key|secret|secret_?key|access_?key|private_?key|passw(or)?d|(access|api|auth|bearer|hf)_?token)$",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]*@", re.IGNORECASE)
_SIGNED = re.compile(
    r"://.*[?&](x-amz-signature|x-goog-signature|signature|sig|token|access_token|api_key)=", re.IGNORECASE
)
# AWS, the Hugging Face hub, OpenAI and Anthropic, GitHub, W&B.
_KNOWN = re.compile(
    r"\b(AKIA[0-9A-Z]{16}|hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{36}|wandb_v1_[A-Za-z0-9_]{20,})"
)
_INSTEAD = "a recipe is kept with every result and shown in Prefect. Put it into an environment variable"


def check_secrets(recipe: Recipe) -> list[str]:
    """Return a problem for every setting with a credential, without repeating it."""
    return [f"`{key}` {what}: {_INSTEAD}{_how(key)}" for key, what in _credentials("", recipe.model_dump(mode="json"))]


def _credentials(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each such setting in `value`, and the problem."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _credentials(f"{key}.{name}" if key else str(name), item)
    elif isinstance(value, list):
        for item in value:
            yield from _credentials(key, item)
    elif isinstance(value, str) and (what := _wrong(key.rpartition(".")[2], value)):
        yield key, what


def _wrong(name: str, value: str) -> str:
    if _USERINFO.match(value):
        return "is a URL with a user or password"
    if _SIGNED.search(value):
        return "is a URL with a signature or token, which would be part of the result's key too"
    if _KNOWN.search(value) or (value and _SECRET_KEY.search(name)):
        return "holds a credential"
    return ""


def _how(key: str) -> str:
    if any(f".{part}." in key for part in ("rewards", "scorers", "judge")):
        return ", and name that in the reward's `variables`, `header_variable` or `url_variable`"
    return ", as fsspec, the hub and AWS read their own"
