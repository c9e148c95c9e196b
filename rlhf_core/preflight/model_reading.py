"""Inspection of a model folder by transformers' class, in a process of its own, which can be killed."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rlhf_core.errors import StageError
from rlhf_core.models.folders import inspection
from rlhf_core.models.folders.check import untied_problem
from rlhf_core.models.folders.folder import GENERATION_CONFIG, Head
from rlhf_core.models.folders.headers import stored_tensors
from rlhf_core.models.folders.inspection import Inspection
from rlhf_core.preflight.kept import kept
from rlhf_core.processes.lines import ProcessError
from rlhf_core.processes.trial import tried

_SECONDS = 120.0
_MEMORY = 8 << 30  # bytes, more than any model takes without weights


def inspected(folder: Path, *, reward_model: bool) -> Inspection | None:
    """Return the result of models/folders/inspection.py for a folder without `folder_problems`, cached on this node.

    None on a machine without torch, where the base stage's job is the first to inspect it. Raises StageError for a
    folder that this job would reject.
    """
    if find_spec("torch") is None:
        return None
    head: Head = "scalar" if reward_model else "causal"
    inspection = Inspection(**json.loads(_answer(folder, head, _key(folder, head))))
    # The result depends on the headers: the content of the tensors may have changed since.
    if (problem := untied_problem(folder, inspection.tied)) is not None:
        raise StageError(problem)
    return inspection


def _key(folder: Path, head: Head) -> str:
    """Return a digest of all inputs of the result: the folder's settings and headers, and the code that reads them."""
    digest = hashlib.sha256(f"{version('transformers')} {version('torch')} {head}".encode())
    for name in ("config.json", GENERATION_CONFIG):
        digest.update((folder / name).read_bytes() if (folder / name).is_file() else b"")
        digest.update(b"\0")
    digest.update(repr(sorted(stored_tensors(folder).items())).encode())
    for module in sorted(Path(inspection.__file__).parents[1].rglob("*.py")):
        digest.update(module.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=32)
def _answer(folder: Path, head: Head, key: str) -> str:
    return kept("inspected", key, lambda: _inspect(folder, head))


def _inspect(folder: Path, head: Head) -> str:
    try:
        return tried(_SECONDS, _MEMORY, inspection.inspect_as_json, str(folder), head)
    except StageError as error:
        raise StageError(str(error).removeprefix(f"{folder}: ")) from error
    except TimeoutError as error:
        raise StageError(
            f"transformers builds no model by config.json within {_SECONDS:g} s: fetch the folder again"
        ) from error
    except MemoryError as error:
        raise StageError(
            f"the model of config.json takes more than {_MEMORY >> 30} GiB without its weights: correct its sizes"
        ) from error
    except ProcessError as error:
        raise StageError(
            f"the process in which transformers builds a model by config.json {error}: fetch the folder again"
        ) from error
