"""Everything that can be checked before a job starts: the recipe, the files it names, the store. One way for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.config.loading import LoadedRecipe, load_recipe
from rlhf_core.pipeline.graph import Node, build_graph
from rlhf_core.pipeline.preflight import preflight
from rlhf_core.stages.key import computing_libraries


@dataclass(frozen=True, slots=True)
class Prepared:
    loaded: LoadedRecipe
    libraries: Mapping[str, str]
    graph: Mapping[str, Node]
    store_url: str
    store: Store
    repository: ArtifactRepository


def prepare(recipe: str, overrides: Sequence[str]) -> Prepared:
    """A recipe that can run here: read, checked, its graph built, its store probed.

    Raises RecipeError for what its writer can mend, StoreError for a store that cannot hold its results.
    """
    loaded = load_recipe(recipe, overrides)
    libraries = computing_libraries()
    preflight(loaded)
    graph = build_graph(loaded, libraries)
    url = store_url()
    store = open_store(url)
    store.probe()
    return Prepared(loaded, libraries, graph, url, store, ArtifactRepository(store))
