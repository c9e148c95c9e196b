"""Scores of reasoning-gym's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import reasoning_gym  # noqa: F401  loaded now: a call has a shorter limit

from rlhf_core.data.sources.reasoning import score


def score_one(task: str, answer: str, row: Mapping[str, Any]) -> list[float]:
    """Return the score of `answer` for the dataset row `row` of the task `task`, in a list of one."""
    return [float(score(task, answer, row))]
