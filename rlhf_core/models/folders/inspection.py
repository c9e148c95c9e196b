"""Inspection of a model folder with transformers' class."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.models.folders.attention_names import attentions_of
from rlhf_core.models.folders.class_config import class_config, settings_of
from rlhf_core.models.folders.folder import Head
from rlhf_core.models.folders.headers import stored_tensors


@dataclass(frozen=True, slots=True)
class Inspection:
    """Facts about a folder whose weights match its config.json."""

    model_class: str
    settings: Mapping[str, Any]  # as class_config.settings_of gives them
    attentions: Sequence[str]  # as attention.attentions_of lists them
    tied: Mapping[str, str]  # as weights.stored_twice gives them
    plan: Mapping[str, str]  # transformers', of how ranks share its weights


def inspect(folder: Path, head: Head) -> Inspection:
    """Inspect the folder. Raises StageError as `require_fit`."""
    from rlhf_core.models.weights import require_fit, stored_twice  # imports torch

    model = require_fit(folder, head)
    kind = type(model)
    tied = stored_twice(model, stored_tensors(folder))
    plan = getattr(model, "_tp_plan", None) or {}
    return Inspection(kind.__name__, settings_of(class_config(folder)), attentions_of(kind), tied, plan)


def inspect_as_json(folder: str, head: Head) -> str:
    """Inspect the folder in a process of its own: its parent needs no torch."""
    return json.dumps(asdict(inspect(Path(folder), head)), default=str)
