"""Settings of a reward server, and the check of its model. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.config.base import Dtype
from rlhf_core.errors import StageError
from rlhf_core.models.folders.folder import is_classifier, read_config
from rlhf_core.models.folders.readers import Scale, stored_scale


@dataclass(frozen=True, slots=True)
class Serving:
    """Settings of a worker process, sent through a pipe so that no command line contains the token."""

    folder: Path  # the reward model's
    model: str  # its name in /health
    token: str = field(repr=False)
    dtype: Dtype
    threads: int  # of torch, in each worker process
    key: str | None = None  # of its artifact
    normalize: bool = True
    tokens_per_batch: int = 16384  # of one forward
    max_texts: int = 4096  # of one request
    max_bytes: int = 64 * 2**20  # of one request
    max_waiting: int = 65536  # texts; more are rejected as too busy
    silent_seconds: float = 20.0  # without data of an incomplete request, until it is rejected
    body_seconds: float = 300.0  # for receiving a whole request


def require_reward_model(folder: Path, *, normalize: bool) -> Scale:
    """Return the scale of its rewards. Raises StageError if the folder has no reward model, or lacks this scale."""
    config = read_config(folder)
    if not is_classifier(config):
        raise StageError(f"{folder}: this is not a reward model: its config.json names {config.get('architectures')}")
    scale = stored_scale(config) if normalize else Scale()
    if scale is None:
        raise StageError(
            f"{folder}: config.json has no reward_mean and reward_std by which its rewards could be normalised; "
            "give --raw to serve them as they are"
        )
    return scale
