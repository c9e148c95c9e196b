"""What a reward server is told, and whether its model can be served. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.config.base import Dtype
from rlhf_core.errors import StageError
from rlhf_core.models.folders.folder import is_classifier, read_config
from rlhf_core.models.folders.readers import Scale, stored_scale


@dataclass(frozen=True, slots=True)
class Serving:
    """What a worker process needs to know. It gets it through a pipe: no command line holds the token."""

    folder: Path  # the reward model's
    model: str  # as it is called in /health
    token: str = field(repr=False)
    dtype: Dtype
    threads: int  # of torch, in each worker process
    key: str | None = None  # of its artifact
    normalize: bool = True
    tokens_per_batch: int = 16384  # of one forward
    max_texts: int = 4096  # of one request
    max_bytes: int = 64 * 2**20  # of one request
    max_waiting: int = 65536  # texts; more are refused as too busy
    silent_seconds: float = 20.0  # of a client that has not sent all of its request; it is refused then
    body_seconds: float = 300.0  # that the whole of a request may take to come


def require_reward_model(folder: Path, *, normalize: bool) -> Scale:
    """What its rewards are normalised by. Raises StageError if the folder has no reward model, or no such numbers."""
    config = read_config(folder)
    if not is_classifier(config):
        raise StageError(f"{folder}: this is no reward model: its config.json names {config.get('architectures')}")
    scale = stored_scale(config) if normalize else Scale()
    if scale is None:
        raise StageError(
            f"{folder}: config.json has no reward_mean and reward_std by which its rewards could be normalised; "
            "give --raw to serve them as they are"
        )
    return scale
