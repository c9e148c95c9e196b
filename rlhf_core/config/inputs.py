"""Settings that name what a stage reads: datasets and models, by the names that the recipe gives them.

Such a setting is annotated with `Reads`. A recipe's graph is made from these annotations alone: the path of the setting
in its stage's section (`dataset`, `ppo.rewards.helpful.model`) is the name of the input that the stage gets. The name
that the recipe chose stays out of the stage key, which holds the key of the artifact itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.base import Config, Reads, reads_of


@dataclass(frozen=True, slots=True)
class Reference:
    """A setting that names an input: its path below the stage's section, and the names it holds."""

    path: str
    reads: Reads
    names: tuple[str, ...]  # empty: the setting is none, or a reserved value
    many: bool  # the setting is a tuple: each name is an input `path.name` of its own


def references(config: Config, at: str = "") -> Iterator[Reference]:
    """Every used setting of `config`, at any depth, that names inputs."""
    for name, value in config.used_settings():
        path = f"{at}.{name}" if at else name
        reads = reads_of(type(config), name)
        if reads is not None:
            many = isinstance(value, tuple)
            named = value if many else () if value is None or value in reads.reserved else (value,)
            yield Reference(path, reads, named, many)
        else:
            yield from _references_below(value, path)


def _references_below(value: Any, path: str) -> Iterator[Reference]:
    if isinstance(value, Config):
        yield from references(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _references_below(item, f"{path}.{key}")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _references_below(item, f"{path}.{index}")
