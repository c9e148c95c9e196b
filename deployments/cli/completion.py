"""Completions of the shell: names of recipes, artifacts and runs. A store that does not answer completes to nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path

from deployments.stack.environment import load_stack_environment
from rlhf_core.artifacts.aliases import ALIASES
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import AlignmentError
from rlhf_core.recipe.known_recipes import known_recipes

_SHOWN_DIGITS = 12  # of a key


def _completes(names: Callable[[str], Iterable[str]]) -> Callable[[str], list[str]]:
    """Keep the names that start as the argument does; a message in its place would be taken for one."""

    @wraps(names)
    def completed(incomplete: str) -> list[str]:
        try:
            load_stack_environment()
            return sorted({name for name in names(incomplete) if name.startswith(incomplete)})
        except AlignmentError:
            return []

    return completed


@_completes
def recipe_names(incomplete: str) -> Iterable[str]:
    folder = os.path.dirname(incomplete)  # as it was written
    files = [os.path.join(folder, path.name) for path in Path(folder or ".").glob("*.y*ml")]
    return [*known_recipes(), *files]


@_completes
def artifact_names(incomplete: str) -> Iterable[str]:
    """One listing of the store: of all stages, or once a stage is written, of its artifacts alone."""
    slash = "/" in incomplete
    store = open_store(store_url())
    listed = (path.split("/") for path in store.list(f"stages/{incomplete}" if slash else "stages/"))
    found = [parts[1:3] for parts in listed if len(parts) == 4 and parts[3] == "manifest.json"]
    names = [f"{name}/{key[:_SHOWN_DIGITS]}" for name, key in found]
    return [*names, *(path.removesuffix(".json") for path in _below(store, f"{ALIASES}/"))]


@_completes
def run_ids(incomplete: str) -> Iterable[str]:
    return [path.partition("/")[0] for path in _below(open_store(store_url()), "runs/")]


def _below(store: Store, folder: str) -> list[str]:
    return [path.removeprefix(folder) for path in store.list(folder)]
