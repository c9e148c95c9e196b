"""Documents of the commands that write files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Files:
    """Of commands that write files."""

    paths: Sequence[Path]


@dataclass(frozen=True, slots=True)
class Translated(Files):
    """Of `init --from`."""

    untranslated: Sequence[str]  # a sentence for each setting of the file without a counterpart
    assumed: Sequence[str]  # a sentence for each setting of the recipe that the file does not have


@dataclass(frozen=True, slots=True)
class Export:
    target: str | None  # path or URL; None with --dry-run
    card: str | None = None  # with --dry-run
