from __future__ import annotations

import random

import numpy
import pytest
import torch
from safetensors.torch import load, save

from rlhf_core.training.distributed import join_group
from rlhf_core.training.randomness import derived_seed, load_random_state, random_state, seed_everything, seed_rank

pytestmark = pytest.mark.parts


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_one_seed_fixes_every_generator() -> None:
    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_a_derived_seed_depends_on_seed_and_purpose() -> None:
    seeds = {derived_seed(seed, purpose) for seed in range(3) for purpose in ("epoch 0", "epoch 1", "rank 1")}
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Pinned: with another seed the same stage key would name other weights.
    assert derived_seed(0, "epoch 0") == 3336698846914116920


def test_the_first_rank_keeps_its_generators() -> None:
    join_group(rank=0, size=1)
    seed_everything(7)
    expected = draw()
    seed_everything(7)
    seed_rank(7)
    assert draw() == expected


def test_any_seed_will_do() -> None:
    seed_everything(2**40 + 1)
    first = draw()
    seed_everything(2**40 + 1)
    assert draw() == first


def test_all_generators_go_on_where_they_were_also_between_two_normal_draws() -> None:
    """Python and numpy draw normal numbers in pairs and keep the second."""
    seed_everything(7)
    random.gauss(0, 1), numpy.random.randn()
    kept = load(save(random_state()))
    expected = (random.gauss(0, 1), float(numpy.random.randn()), *draw())
    seed_everything(8)
    load_random_state(kept)
    assert (random.gauss(0, 1), float(numpy.random.randn()), *draw()) == expected
