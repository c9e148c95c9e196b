"""Runtimes, in which an episode's commands run. One file per kind, listed in config/environments/runtimes.py."""

from __future__ import annotations

from rlhf_core.runtimes.base import Image, Ran, Runtime, RuntimeHost
from rlhf_core.runtimes.opening import open_runtimes

__all__ = ["Image", "Ran", "Runtime", "RuntimeHost", "open_runtimes"]
