"""What transformers makes of a model folder: asked in a process of its own, which may be ended."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from rlhf_core.models import class_config
from rlhf_core.models.expected_tensors import is_known
from rlhf_core.models.headers import read_text

_SECONDS = 120


@lru_cache(maxsize=32)
def as_read(text: str, name: str) -> tuple[bool, str]:
    """Whether transformers reads a file of this name and text; what models/class_config.py prints of it, or why not.
    Loads no torch."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_text(text, encoding="utf-8")
        done = _run([class_config.__name__, folder, name])
    if done is None:
        return False, f"{name} is not read within {_SECONDS} s: fetch it again"
    if done.returncode == 0:
        return True, done.stdout
    return False, _last_line(done.stderr) or f"{name} cannot be read: fetch it again"


def misfit_by_class(folder: Path, *, reward_model: bool) -> str | None:
    """Which weights of the folder are not those of its model, as the job of the base stage finds; None: all are.

    None, too, where models/expected_tensors.py knows the tensors, which needs no process that takes seconds, and on a
    machine without torch, where the job is the first to see it. transformers must read the folder's config.json.
    """
    _, settings = as_read(read_text(folder / "config.json"), "config.json")
    if is_known(json.loads(settings)) or find_spec("torch") is None:
        return None
    done = _run(["rlhf_core.models.weights", str(folder), "scalar" if reward_model else "causal"])
    if done is None:
        return f"transformers builds no model by config.json within {_SECONDS} s: fetch the folder again"
    if done.returncode == 0:
        return None
    said = _last_line(done.stderr).removeprefix(f"{folder}: ")
    if done.returncode == 1 and said:
        return said
    return "transformers ended while it built a model by config.json, perhaps out of memory: fetch the folder again"


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """`python -m ARGUMENTS`; None: it took too long."""
    command = [sys.executable, "-m", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
