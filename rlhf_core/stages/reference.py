"""The reference model of a supervised stage."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.reference import REFERENCE_INPUT, ReferencedConfig
from rlhf_core.contract import Input
from rlhf_core.errors import StageError
from rlhf_core.models.folder import read_config
from rlhf_core.models.readers import reader_problem, same_tokens


def reference_of(config: ReferencedConfig, inputs: Mapping[str, Input]) -> ArtifactRef:
    """What the reference starts from: the model that training starts from, unless the settings name another.

    Raises StageError if that one cannot read the policy's tokens.
    """
    for setting, (name, advice) in config.token_readers.items():
        folder, policy = inputs[name].folder, inputs["model"].folder
        reads = same_tokens(folder, policy)
        if problem := reader_problem(read_config(folder), "max_length", config.max_length, reads_tokens=reads):
            raise StageError(f"{setting}: {problem}: {advice}")
    return inputs[REFERENCE_INPUT if config.token_readers else "model"].manifest.ref
