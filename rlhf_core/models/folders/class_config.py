"""A model's config.json as read by transformers, with the defaults of its class. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.errors import StageError, reason_of
from rlhf_core.models.folders.folder import GENERATION_CONFIG

_UNFIT = {
    "config.json": "config.json is not what transformers expects of its model_type: correct it",
    GENERATION_CONFIG: f"{GENERATION_CONFIG} is not what transformers expects: correct it or remove it",
}
_EXPERTS, _CHOSEN = ("num_local_experts", "num_experts", "n_routed_experts"), "num_experts_per_tok"


def class_config(folder: Path, **changes: object) -> Any:
    """Return the folder's PreTrainedConfig, of one of transformers' own classes. changes: settings that replace
    config.json's.

    Raises StageError if transformers has no config for it.
    """
    from transformers import AutoConfig

    with _refused("config.json"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **changes)
        if isinstance(config.get_text_config(decoder=True), Mapping):
            raise ValueError("the class has no parts, so no `text_config`: remove it")
        return config


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings of the language model from `class_config`. One with another name in this class is also under
    the usual one.
    """
    text = config.get_text_config(decoder=True)
    settings = {**config.to_dict(), **text.to_dict(), "model_type": config.model_type}
    return {usual: settings[own] for usual, own in text.attribute_map.items() if own in settings} | settings


def require_generation_config(folder: Path) -> None:
    """Raise StageError for one with which transformers fails to load the model."""
    from transformers import GenerationConfig

    with _refused(GENERATION_CONFIG):
        GenerationConfig.from_pretrained(folder, local_files_only=True)


def settings_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each setting with which a model can be built but not run. settings: of `settings_of`."""
    yield from _position_problems(settings)
    experts = next((count for name in _EXPERTS if isinstance(count := settings.get(name), int) and count > 0), None)
    chosen = settings.get(_CHOSEN)
    if experts is not None and isinstance(chosen, int) and not 1 <= chosen <= experts:
        yield f"config.json: {_CHOSEN} is {chosen}; it must be from 1 to the number of experts, {experts}: correct it"
    rows, pad = settings.get("vocab_size"), settings.get("pad_token_id")
    if isinstance(rows, int) and isinstance(pad, int) and pad >= rows:
        yield f"config.json: pad_token_id is {pad} (by default), but the vocabulary ends at {rows - 1}: set it"
    window = settings.get("sliding_window")
    if "sliding_attention" in (settings.get("layer_types") or ()) and not (isinstance(window, int) and window > 0):
        shown = json.dumps(window)
        yield f"config.json: sliding_window is {shown}, and layers slide (layer_types): give a whole number above 0"


def _position_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    whole = settings.get("rope_parameters")
    if not isinstance(whole, Mapping):
        return
    size = settings.get("head_dim")
    if whole and isinstance(size, int) and size <= 0:
        yield f"config.json: head_dim is {size}, and its rotary positions need one above 0: correct it"
    kinds = {f"rope_parameters.{kind}.": part for kind, part in whole.items() if isinstance(part, Mapping)}
    for place, part in {"": settings, "rope_parameters.": whole, **kinds}.items():
        share = part.get("partial_rotary_factor")
        if share is not None and (not isinstance(share, int | float) or not 0 < share <= 1):
            shown = json.dumps(share)
            yield f"config.json: {place}partial_rotary_factor is {shown}; it must be above 0, and at most 1: correct it"


@contextmanager
def _refused(file: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the values are the user's; the library may raise anything
        raise StageError(f"{_UNFIT[file]} ({reason_of(error)})") from error
