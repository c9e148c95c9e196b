"""Losses on preference pairs, one small file each; config/stages/preference_losses.py lists them."""

from pkgutil import resolve_name
from typing import Any

from rlhf_core.config.stages.preference_losses import PREFERENCE_LOSSES, PreferenceLossConfig
from rlhf_core.losses.preference.base import PairLogprobs, PreferenceLoss


def build_preference_loss(config: PreferenceLossConfig) -> PreferenceLoss[Any]:
    """Return the implementation of a preference loss with its settings."""
    implementation: type[PreferenceLoss[Any]] = resolve_name(PREFERENCE_LOSSES[config.type].implementation)
    return implementation(config)


__all__ = ["PairLogprobs", "PreferenceLoss", "build_preference_loss"]
