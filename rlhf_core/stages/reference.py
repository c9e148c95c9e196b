"""The reference model of a supervised stage."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.stages.reference_model import REFERENCE_INPUT, ReferencedConfig
from rlhf_core.contract import Input
from rlhf_core.rl.roles import require_same_tokens


def reference_of(config: ReferencedConfig, inputs: Mapping[str, Input]) -> ArtifactRef:
    """Return the initial weights of the reference: those of the trained model, unless the settings name others.

    Raises StageError if these cannot read the policy's tokens.
    """
    require_same_tokens(config.token_readers, inputs, "max_length", config.max_length)
    return inputs[REFERENCE_INPUT if config.token_readers else "model"].manifest.ref
