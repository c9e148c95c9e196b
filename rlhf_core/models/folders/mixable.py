"""Checks whether models can be merged, by their config.json. Loads no torch.

Used before a run, for every available model, and by the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.models.folders.folder import text_config

OTHER_TOKENIZER = "its tokenizer is not that of `model`: name another"
# Settings by which the same weights compute the same.
_OF_NO_WEIGHT = frozenset(
    {
        "_name_or_path", "architectures", "dtype", "initializer_range", "max_position_embeddings", "pretraining_tp",
        "text_config", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip
_OF_NO_WEIGHT_ENDINGS = ("dropout", "_token_id")


def mix_problem(config: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the reason why the weights of two models differ in meaning, though their shapes may be equal; None if the
    configs agree.

    A setting that only one of the two has may be the other's default.
    """
    settings, other_settings = text_config(config), text_config(other)
    for name in sorted(settings.keys() & other_settings.keys()):
        counts = name not in _OF_NO_WEIGHT and not name.endswith(_OF_NO_WEIGHT_ENDINGS)
        if counts and settings[name] != other_settings[name]:
            return (
                f"its {name} is {other_settings[name]}, and that of `model` is {settings[name]}: only models of one "
                "architecture can be merged"
            )
    return None
