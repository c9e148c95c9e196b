"""Batches of sequences that share what they begin with."""

from __future__ import annotations

import random

from rlhf_core.packing import pack
from rlhf_core.types import PackedBatch

PROMPT = list(range(20))


def batch_of(*sequences: list[int]) -> PackedBatch:
    return pack(sequences, [[True] * len(ids) for ids in sequences])


def grown(seed: int, vocabulary: int = 9) -> list[list[int]]:
    """Sequences that branch off each other anywhere, the same one twice, one that another begins with."""
    rng = random.Random(seed)
    sequences: list[list[int]] = []
    for _ in range(rng.randint(1, 12)):
        stem = rng.choice(sequences)[: rng.randint(0, 40)] if sequences else []
        sequences.append(stem + [rng.randrange(vocabulary) for _ in range(rng.randint(0 if stem else 1, 30))])
    rng.shuffle(sequences)
    return sequences
