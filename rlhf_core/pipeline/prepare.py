"""Everything that can be checked before a job starts: the recipe, the files it names, the store. One way for all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import RecipeError, StoreError, did_you_mean
from rlhf_core.pipeline.graph import Node, build_graph
from rlhf_core.pipeline.loading import LoadedRecipe, load_recipe
from rlhf_core.pipeline.outline import outline
from rlhf_core.pipeline.preflight import Seen, look
from rlhf_core.pipeline.preflight_effects import effect_notes
from rlhf_core.stages.key import computing_libraries


@dataclass(frozen=True, slots=True)
class Checked:
    """A recipe that can run here: read and checked, its graph built."""

    loaded: LoadedRecipe
    libraries: Mapping[str, str]
    graph: Mapping[str, Node]
    left_out: Mapping[str, str]  # stages of the recipe that no node runs, and why
    seen: Seen  # in its files
    notes: Sequence[str]  # what to know of it that is no mistake

    def node(self, name: str) -> Node:
        """Raises RecipeError, which lists the nodes, if there is no such one."""
        if name not in self.graph:
            recipe, near = self.loaded.recipe.name, did_you_mean(name, self.graph)
            raise RecipeError(f"the recipe {recipe} has no node `{name}`{near}; it has {', '.join(self.graph)}")
        return self.graph[name]


@dataclass(frozen=True, slots=True)
class Prepared(Checked):
    """A checked recipe, and the store that its results go to."""

    store: Store
    repository: ArtifactRepository


def check(
    recipe: str, overrides: Sequence[str], resolved: dict[str, str] | None = None, store: str | None = None
) -> Checked:
    """Reads the store only where the recipe names an artifact of it.

    resolved: what was looked up before, artifacts and remote sources alike; extended in place.
    store: its URL; none: the store that the environment names.
    Raises RecipeError for what its writer can correct, StoreError if the store is needed and cannot be read.
    """
    loaded = load_recipe(recipe, overrides)
    libraries = computing_libraries()
    pinned = {} if resolved is None else resolved

    def find(ref: str) -> Manifest:
        name = f"artifact:{ref}"
        try:
            manifest = ArtifactRepository(_opened(store)).find(pinned.get(name, ref))
        except StoreError as error:
            raise RecipeError(str(error)) from error
        pinned[name] = f"{manifest.stage}/{manifest.key}"
        return manifest

    drafts = outline(loaded.recipe, find)
    seen = look(loaded, drafts)
    notes = [*loaded.notes, *effect_notes(loaded.recipe, drafts.nodes, seen.rows), *seen.notes]
    return Checked(loaded, libraries, build_graph(loaded, libraries, drafts, pinned), drafts.left_out, seen, notes)


def prepare(recipe: str, overrides: Sequence[str], run_id: str = "", store: str | None = None) -> Prepared:
    """Like `check`, with the store at the URL `store`, or that the environment names, which is probed.

    run_id: of a run that starts or is retried. A retry uses what aliases, branches and files meant at the first start.
    """
    resolved: dict[str, str] = {}
    if run_id and (kept := _opened(store).get(_pins_path(run_id))) is not None:
        resolved = json.loads(kept)
    checked = check(recipe, overrides, resolved, store)
    opened = _opened(store)
    opened.probe()
    if run_id and resolved:
        opened.put(_pins_path(run_id), json.dumps(resolved, indent=1).encode())
    return Prepared(
        checked.loaded, checked.libraries, checked.graph, checked.left_out, checked.seen, checked.notes,
        opened, ArtifactRepository(opened),
    )  # fmt: skip


def _opened(url: str | None) -> Store:
    """The store at `url`, or that the environment names. Raises StoreError if that names none."""
    return open_store(url or store_url())


def _pins_path(run_id: str) -> str:
    return f"runs/{run_id}/pins.json"
