"""Start of a vLLM engine. Importing this module imports neither vLLM nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.rollout.vllm.environment import take_temporary_folder

if TYPE_CHECKING:
    from rlhf_core.rollout.vllm.engine import VllmEngine


def start(folder: Path, settings: EngineSettings) -> VllmEngine:
    """Start an engine of the model in `folder`, in a process dedicated to engines."""
    take_temporary_folder()
    # Importing vLLM takes seconds, which only the processes of engines should spend.
    from rlhf_core.rollout.vllm.engine import VllmEngine

    return VllmEngine(folder, settings)
