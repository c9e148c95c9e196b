"""Stop tokens of a model folder for other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf_core.chat.encoding import load_tokenizer, stop_token_ids
from rlhf_core.models.folders.folder import GENERATION_CONFIG, read_config, text_config
from rlhf_core.models.folders.headers import read_object


def write_ends_of_turn(folder: Path) -> None:
    """Add every token that ends a completion to the `eos_token_id` of a model folder's generation_config.json.

    transformers and vLLM stop only at those: without the ends that the chat template writes they would sample to the
    limit.
    """
    path = folder / GENERATION_CONFIG
    settings: dict[str, Any] = read_object(path) if path.is_file() else _special_tokens(folder)
    eos = settings.get("eos_token_id")
    stored_ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ends = list(dict.fromkeys([*stored_ends, *stop_token_ids(load_tokenizer(folder))]))
    if ends != stored_ends:
        content = settings | {"eos_token_id": ends[0] if len(ends) == 1 else ends}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _special_tokens(folder: Path) -> dict[str, Any]:
    """Return the settings that transformers takes from config.json if there is no generation_config.json."""
    config = text_config(read_config(folder))
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    return {name: config[name] for name in names if config.get(name) is not None}
