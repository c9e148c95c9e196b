"""Environments, one per file, listed in config/environments/environments.py."""

from __future__ import annotations

from rlhf_core.environments.agents.program import Program
from rlhf_core.environments.base import Environment, EnvironmentHost, Feedback, Reply
from rlhf_core.environments.opening import open_environments, rows_to_play, single_turn

__all__ = [
    "Environment", "EnvironmentHost", "Feedback", "Program", "Reply", "open_environments",
    "rows_to_play", "single_turn",
]  # fmt: skip
