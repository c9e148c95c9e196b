"""Resolved settings as a flat list, for those who compare or log them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flattened(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings by their dotted path; a list, and an empty mapping, is one value."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
