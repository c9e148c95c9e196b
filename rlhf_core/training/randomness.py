"""Seeding, saving and restoring of all random generators of a process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import numpy
import torch
from torch import Tensor

from rlhf_core.mesh import current_mesh


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators (all devices) equally on every rank.

    New weights, such as an adapter's, are then initialised alike. Call `seed_rank` after building the models.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_rank(seed: int) -> None:
    """Seed torch's generators (all devices) by the tokens of a rank, so that dropout differs between replicas, and
    between ranks with other tokens of a sequence, but not between those that share weights.

    The first ones are left unchanged, so a run with one rank does not depend on this call.
    """
    mesh = current_mesh()
    if place := mesh.replica * mesh.sequence + mesh.part:
        torch.manual_seed(derived_seed(seed, f"rank {place}"))


def derived_seed(seed: int, purpose: str) -> int:
    """Return a seed of 63 bits for one purpose of the run with `seed`, such as `epoch 3`.

    A hash, so that no two purposes and no neighbouring seeds share a random stream. Its low 32 bits must suffice to
    distinguish seeds: torch's generator on CPU (a Mersenne twister) ignores the others.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def torch_random_state() -> list[Tensor]:
    """Return the states of torch's generators, for the CPU and this GPU, if any."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def random_state() -> dict[str, Tensor]:
    """Return the state of Python's generator, numpy's global one, and torch's for the CPU and this GPU, if any."""
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
    """Restore all generators to a state that `random_state` returned."""
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
