"""Environments, one per file; config/environments.py lists them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from rlhf_core.config.environments import ENVIRONMENTS, EnvironmentConfig
from rlhf_core.environments.base import Environment, Feedback

__all__ = ["Environment", "Feedback", "environment_maker"]


def environment_maker(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Makes an environment of `config` for each episode."""
    module, _, name = ENVIRONMENTS[config.type].implementation.partition(":")
    implementation: Callable[[EnvironmentConfig], Environment] = getattr(import_module(module), name)
    return lambda: implementation(config)
