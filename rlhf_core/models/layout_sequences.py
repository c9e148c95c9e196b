"""Short test sequences for comparing layouts, of tokens without a special meaning for the model."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_core.packing import pack
from rlhf_core.types import PackedBatch

LENGTHS = (6, 11, 4)  # of the sequences, in tokens; the gradient of the middle one is compared
SHARED, _BRANCH = 9, 5  # of the middle one: tokens that another begins with, and how many follow there


def different_sequences(model: Any, device: torch.device) -> PackedBatch:
    """Return one sequence of each length in LENGTHS, on `device`."""
    config = model.config
    text = config.get_text_config()
    special = {
        value for part in (config, text) for key, value in part.to_dict().items()
        if key.endswith(("token_id", "token_index")) and isinstance(value, int)
    }  # fmt: skip
    plain = [i for i in range(min(text.vocab_size, 1000)) if i not in special]
    total = sum(LENGTHS)
    # All different if there are as many. A tree shares what sequences begin with, so those tokens must differ at least.
    period = next((p for p in range(min(total, len(plain)), 0, -1) if _begin_apart(p)), len(plain))
    step = max(1, len(plain) // total)  # neighbours in a vocabulary may all be unused, with equal embeddings
    ids = torch.tensor([plain[i % period * step] for i in range(total)])
    parts = list(ids.split(list(LENGTHS)))
    return pack(parts, [torch.ones(len(part)) for part in parts]).to(device)


def _begin_apart(period: int) -> bool:
    """Return whether sequences of tokens that recur after `period` begin differently, and branching ones diverge at
    the intended token.
    """
    first, middle, last = (start % period for start in (0, LENGTHS[0], sum(LENGTHS[:-1])))
    return len({first, middle, last}) == len(LENGTHS) and (middle + SHARED) % period != first


def branching_sequences(batch: PackedBatch) -> PackedBatch:
    """Return the middle sequence, and another with the same prefix."""
    first, middle, _ = batch.input_ids.cpu().split(list(LENGTHS))
    parts = [middle, torch.cat([middle[:SHARED], first[:_BRANCH]])]
    return pack(parts, [torch.ones(len(part)) for part in parts]).to(batch.input_ids.device)


def continued_sequence(batch: PackedBatch) -> PackedBatch:
    """Return the middle sequence followed by the first tokens of the first one, which must not change it in a causal
    model.
    """
    first, middle, _ = batch.input_ids.split(list(LENGTHS))
    ids = torch.cat([middle, first[:3]])
    return pack([ids.cpu()], [torch.ones(len(ids))]).to(batch.input_ids.device)
