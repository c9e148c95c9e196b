"""Several sources drawn by weight: exactly in proportion, the same every time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def mix(sources: Sequence[Sequence[T]], weights: Sequence[float], *, seed: int, shuffle: bool) -> list[tuple[int, T]]:
    """(source index, row) in the order drawn, until the source that is due has no more rows.

    The next row comes from the source that is furthest behind its share, so that any beginning of the result has
    each source's share to within one row. No row is drawn twice. With `shuffle`, each source's rows are taken in a
    random order made from `seed`.
    """
    orders = [list(range(len(rows))) for rows in sources]
    if shuffle:
        generator = random.Random(seed)
        for order in orders:
            generator.shuffle(order)
    total = sum(weights)
    taken = [0] * len(sources)
    mixed: list[tuple[int, T]] = []
    while True:
        due = max(range(len(sources)), key=lambda i: (weights[i] / total * (len(mixed) + 1) - taken[i], -i))
        if taken[due] == len(sources[due]):
            return mixed
        mixed.append((due, sources[due][orders[due][taken[due]]]))
        taken[due] += 1
