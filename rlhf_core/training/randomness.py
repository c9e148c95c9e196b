"""Every random generator of a process: seeded from one number, kept, and put back."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators (all devices). The same seed on every rank: ranks share data
    order and start weights; what must differ between ranks (dropout) adds the rank itself."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Tensor]:
    """Where the generators are: Python's, numpy's global one, torch's for the CPU and, if there is one, this GPU."""
    version, words, gauss = random.getstate()
    state = {
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "python.version": torch.tensor(version),
        "torch.cpu": torch.get_rng_state(),
    }
    twister = numpy.random.get_state(legacy=False)
    state["numpy.keys"] = torch.from_numpy(twister["state"]["key"].astype(numpy.int64))
    state["numpy.position"] = torch.tensor([twister["state"]["pos"], twister["has_gauss"]])
    state["numpy.gauss"] = torch.tensor(twister["gauss"], dtype=torch.float64)
    if torch.cuda.is_available():
        state["torch.cuda"] = torch.cuda.get_rng_state()
    return state


def load_random_state(state: Mapping[str, Tensor]) -> None:
    """Put all generators back where `random_state` found them."""
    gauss = state["python.gauss"].tolist()
    words = tuple(state["python.words"].tolist())
    random.setstate((int(state["python.version"]), words, gauss[0] if gauss else None))
    position, has_gauss = state["numpy.position"].tolist()
    keys = state["numpy.keys"].numpy().astype(numpy.uint32)
    numpy.random.set_state({
        "bit_generator": "MT19937", "state": {"key": keys, "pos": position},
        "has_gauss": has_gauss, "gauss": float(state["numpy.gauss"]),
    })  # fmt: skip
    torch.set_rng_state(state["torch.cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["torch.cuda"])
