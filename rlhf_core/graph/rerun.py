"""A node that is computed again on purpose although the store has its result."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from rlhf_core.errors import RecipeError

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Rerun:
    """`node@label`. The label is an ingredient of the node's key, and through it of all keys that depend on it."""

    node: str
    label: str

    @classmethod
    def parse(cls, text: str, label: str) -> Self:
        """Parse `node@label`, or `node` with the given label. Raises RecipeError."""
        node, at, written = text.partition("@")
        if not _LABEL.fullmatch(written if at else label):
            raise RecipeError(
                f"`{text}` cannot be run again: write NODE@LABEL, with a label of up to 64 letters, digits, `_.-`, or "
                "NODE alone"
            )
        return cls(node, written if at else label)

    def __str__(self) -> str:
        return f"{self.node}@{self.label}"
