"""Sampled completions as rows of the format `completions`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.data.formats import Row, row_id
from rlhf_core.types import Trajectory


def completion_entry(trajectory: Trajectory, *, tokens: bool = True, logprobs: bool = False) -> Row:
    """Return text, finish reason and summed log-prob of a completion, and optionally its `tokens` and `logprobs`."""
    sampled = trajectory.loss_mask
    token_logprobs = trajectory.rollout_logprobs[sampled].tolist()
    entry: Row = {
        "text": trajectory.completion, "finish_reason": trajectory.finish_reason, "logprob": math.fsum(token_logprobs)
    }  # fmt: skip
    if tokens:
        entry["token_ids"] = trajectory.token_ids[sampled].tolist()
    return entry | ({"logprobs": token_logprobs} if logprobs else {})


def with_rewards(entry: Row, rewards: Mapping[str, float], weights: Mapping[str, float]) -> Row:
    """Return `entry` with `rewards` by name, and with their weighted sum as `reward`."""
    total = math.fsum(weights[name] * value for name, value in rewards.items())
    return {**entry, "reward": total, "rewards": dict(rewards)}


def completions_row(
    asked: Sequence[Mapping[str, Any]], row: Mapping[str, Any], completions: Sequence[Row], **more: Any
) -> Row:
    """Return a row with the completions of one prompt.

    asked: the messages that are answered; row: of the prompt's dataset; more: further columns, such as `tokenizer`, the
    digest of the tokens' tokenizer.
    """
    tools = {"tools": row["tools"]} if "tools" in row else {}
    columns = {"prompt": list(asked), "completions": list(completions), **tools, **more}
    return {"id": row_id(columns), **columns}
