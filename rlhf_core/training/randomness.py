"""Every random generator of a process, seeded from one number."""

from __future__ import annotations

import random

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators (all devices). The same seed on every rank: ranks share data
    order and start weights; what must differ between ranks (dropout) adds the rank itself."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
