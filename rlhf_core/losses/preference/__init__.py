"""Losses on preference pairs, one small file each; config/stages/preference_losses.py lists them."""

from importlib import import_module
from typing import Any

from rlhf_core.config.stages.preference_losses import PREFERENCE_LOSSES, PreferenceLossConfig
from rlhf_core.losses.preference.base import PairLogprobs, PreferenceLoss


def build_preference_loss(config: PreferenceLossConfig) -> PreferenceLoss[Any]:
    """Return the implementation of a preference loss with its settings."""
    module, _, name = PREFERENCE_LOSSES[config.type].implementation.partition(":")
    implementation: type[PreferenceLoss[Any]] = getattr(import_module(module), name)
    return implementation(config)


__all__ = ["PairLogprobs", "PreferenceLoss", "build_preference_loss"]
