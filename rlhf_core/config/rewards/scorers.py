"""Scorers of evaluation and validation, and monitors of RL, which do not train."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from rlhf_core.config.rewards.rewards import Scorer, TextReward


def _check_scorer(scorer: Scorer) -> Scorer:
    if scorer.weight != 1.0:
        raise ValueError("a scorer is never summed with another: remove `weight`")
    if isinstance(scorer, TextReward) and scorer.tolerated_failures:
        raise ValueError("a scorer judges every completion: remove `tolerated_failures`")
    return scorer


def _scores(scorer: Scorer) -> Scorer:
    if isinstance(scorer, TextReward) and not scorer.may_give_scores:
        raise ValueError(f"`{scorer.type}` gives scores from 0 to 1 by its `range` alone: set it, such as [0, 1]")
    return scorer


MonitorConfig = Annotated[Scorer, AfterValidator(_check_scorer)]  # whose rewards are logged
ScorerConfig = Annotated[Scorer, AfterValidator(_check_scorer), AfterValidator(_scores)]  # whose scores count
