"""Inspect a model folder with transformers' class, in a process of its own, so that the caller needs no torch.

Usage: `python -m rlhf_core.models.folders.inspection FOLDER causal|scalar`
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import StageError
from rlhf_core.models.folders.attention_names import attentions_of
from rlhf_core.models.folders.class_config import class_config, settings_of
from rlhf_core.models.folders.folder import Head
from rlhf_core.models.folders.headers import stored_tensors

_GIB = 8  # more than any model takes without weights; without a limit a wrong size takes all memory


@dataclass(frozen=True, slots=True)
class Inspection:
    """Facts about a folder whose weights match its config.json."""

    model_class: str
    settings: Mapping[str, Any]  # as class_config.settings_of gives them
    attentions: Sequence[str]  # as attention.attentions_of lists them
    tied: Mapping[str, str]  # as weights.stored_twice gives them


def inspect(folder: Path, head: Head) -> Inspection:
    """Inspect the folder. Raises StageError as `require_fit`."""
    from rlhf_core.models.weights import require_fit, stored_twice  # imports torch

    model = require_fit(folder, head)
    kind = type(model)
    tied = stored_twice(model, stored_tensors(folder))
    return Inspection(kind.__name__, settings_of(class_config(folder)), attentions_of(kind), tied)


def _main(folder: Path, head: str) -> None:
    # Limit of data, not of addresses, of which libraries reserve more than they use.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _GIB * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    try:
        print(json.dumps(asdict(inspect(folder, "scalar" if head == "scalar" else "causal")), default=str))
    except StageError as refusal:
        sys.exit(str(refusal))
    except MemoryError:
        sys.exit(f"the model of config.json takes more than {_GIB} GiB without its weights: correct its sizes")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
