"""Limits of a page whose content has none: long lists and texts are cut until it is small enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from rlhf_core.report.rollouts import TokenStrip

_FEWEST_POINTS = 2


@dataclass(frozen=True, slots=True)
class Limits:
    items: int = 64  # of any list
    characters: int = 4000  # of any text
    points: int = 500  # of a curve
    tokens: int = 400  # of a sequence

    def halved(self) -> Limits:
        return Limits(
            self.items // 2, self.characters // 2, max(_FEWEST_POINTS, self.points // 2), self.tokens // 2
        )  # fmt: skip


def within(most_bytes: int, render: Callable[[Limits], str]) -> str:
    """Return a page of at most `most_bytes`, with the widest limits at which it has no more."""
    limits = Limits()
    while len((page := render(limits)).encode()) > most_bytes:
        if limits.items == 0:
            raise ValueError(f"the page has more than {most_bytes} bytes without any content")
        limits = limits.halved()
    return page


def bounded(value: Any, limits: Limits, left_out: Counter[str], name: str = "") -> Any:
    """Return plain data, dataclasses too, with lists and texts cut to the limits. left_out: counts what is cut.

    Token strips and what is no plain data stay as they are.
    """
    if isinstance(value, str):
        left_out["characters of long texts"] += max(0, len(value) - limits.characters)
        return value if len(value) <= limits.characters else f"{value[: limits.characters]} …"
    if isinstance(value, Mapping):
        left_out[name] += max(0, len(value) - limits.items)
        kept = list(value.items())[: limits.items]
        return {bounded(k, limits, left_out): bounded(v, limits, left_out, name) for k, v in kept}
    if isinstance(value, list):
        left_out[name] += max(0, len(value) - limits.items)
        return [bounded(each, limits, left_out, name) for each in value[: limits.items]]
    if isinstance(value, tuple):  # a record: each of its values has a meaning
        return tuple(bounded(each, limits, left_out, name) for each in value)
    if is_dataclass(value) and not isinstance(value, type | TokenStrip):
        names = [field.name for field in fields(value)]
        return replace(value, **{each: bounded(getattr(value, each), limits, left_out, each) for each in names})
    return value
