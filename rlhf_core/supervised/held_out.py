"""Held-out metrics of a trained reward model, and the statistics of its rewards in its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.chat.encoding import stop_token_ids
from rlhf_core.config.stages.reward_models import held_out_rows
from rlhf_core.data.fitting import Row
from rlhf_core.data.formats.preferences import by_prompt
from rlhf_core.errors import StageError
from rlhf_core.models.folders.folder import update_json
from rlhf_core.supervised.schedule import shuffled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SCALE = ("reward_mean", "reward_std")


def split_by_prompt(rows: Sequence[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Hold out 5 % of the rows (at least two, at most 2000), whose prompts occur in no trained row.

    Raises StageError if all rows have the same prompt, so that none could be held out.
    """
    groups = list(by_prompt(rows).values())
    if len(groups) < 2:
        raise StageError(
            "the rows have fewer than two different prompts, so none can be held out to judge the model by"
        )
    target = held_out_rows(len(rows))
    held_out: list[Row] = []
    trained: list[Row] = []
    order = shuffled(len(groups), seed=seed, name="held out")
    for index in order[:-1]:
        (held_out if len(held_out) < target else trained).extend(groups[index])
    return trained + groups[order[-1]], held_out


def judgement(measured: Mapping[str, float]) -> dict[str, float]:
    """Return `reward_mean` and `reward_std` of held-out completions, and their other metrics as `held_out_…`.

    Raises StageError if the rewards are not finite or all equal: such a model is useless.
    """
    mean, std = (measured[name] for name in _SCALE)
    if not math.isfinite(mean) or not math.isfinite(std) or std == 0:
        raise StageError(
            "the reward model's rewards of held-out completions are not usable: their mean is "
            f"{mean:g} and their standard deviation {std:g}"
        )
    return {name if name in _SCALE else f"held_out_{name}": value for name, value in measured.items()}


def finish_folder(folder: Path, tokenizer: PreTrainedTokenizerFast, **stored: Any) -> None:
    """Write the files that `AutoModelForSequenceClassification` and the RL stage need beside the weights.

    stored: entries of config.json, such as `reward_mean` and `reward_std`.
    transformers reads the reward at the last token that is not padding, so the padding token must not be one that can
    end a completion. The tokenizer's own padding token is often EOS; then another special token is used.
    """
    pad = _padding_token(tokenizer)
    update_json(
        folder / "config.json",
        **stored,
        pad_token_id=tokenizer.convert_tokens_to_ids(pad) if pad else None,
    )
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            update_json(folder / name, pad_token=pad)


def _padding_token(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return a padding token that ends no completion.

    None: transformers scores one sequence at a time, and rejects a batch.
    """
    ending = stop_token_ids(tokenizer)
    candidates = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token)
    return next((t for t in candidates if t and tokenizer.convert_tokens_to_ids(t) not in ending), None)
