"""All checks before a job starts: the recipe, its files, the store. Every command uses them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.opening import STORE_VARIABLE, open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import Rounds, RoundStart
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import RecipeError, StoreError, did_you_mean
from rlhf_core.graph.graph import Node, build_graph
from rlhf_core.graph.outline import outline
from rlhf_core.graph.rerun import Rerun
from rlhf_core.preflight.calibrations import calibration_notes
from rlhf_core.preflight.calls import call_functions
from rlhf_core.preflight.effects import effect_notes
from rlhf_core.preflight.known_answers import check_answers
from rlhf_core.preflight.look import Seen, look
from rlhf_core.preflight.rounds import check_round
from rlhf_core.preflight.servers import ask_servers
from rlhf_core.preflight.solutions import check_solutions
from rlhf_core.recipe.loading import LoadedRecipe, load_recipe
from rlhf_core.recipe.recipe import Recipe
from rlhf_core.stages.key import node_libraries


def require_loop(recipe: Recipe) -> None:
    """Raise RecipeError for a recipe without rounds."""
    if recipe.loop is None:
        raise RecipeError(
            f"the recipe {recipe.name} has no `loop`, so there are no rounds of it: add `loop`, or use `alignment run`"
        )


@dataclass(frozen=True, slots=True)
class Checked:
    """A checked recipe with its graph."""

    loaded: LoadedRecipe
    graph: Mapping[str, Node]
    left_out: Mapping[str, str]  # stages of the recipe that no node runs, and why
    seen: Seen  # in its files
    notes: Sequence[str]  # what to know of it that is no mistake
    start: RoundStart | None  # of the loop's round that it is; None: it is no loop, or there is no store

    def node(self, name: str) -> Node:
        """Return the node. Raises RecipeError, which lists the nodes, if there is none."""
        if name not in self.graph:
            recipe, near = self.loaded.recipe.name, did_you_mean(name, self.graph)
            raise RecipeError(f"the recipe {recipe} has no node `{name}`{near}; it has {', '.join(self.graph)}")
        return self.graph[name]

    def ask_servers(self, repository: ArtifactRepository | None) -> list[str]:
        """Query the reward servers of nodes to be computed; see preflight/servers.py."""
        return ask_servers(self.graph, self.loaded.recipe.data, self.seen.samples, repository)

    def call_functions(self, repository: ArtifactRepository | None) -> list[str]:
        """Call the functions of nodes to be computed; see preflight/calls.py."""
        return call_functions(self.graph, self.loaded.recipe.data, self.seen.samples, self.loaded.root, repository)

    def check_answers(self, repository: ArtifactRepository | None) -> list[str]:
        """Compare rewards of nodes to be computed on known answers; see preflight/known_answers.py."""
        return check_answers(self.graph, self.loaded.recipe.data, self.seen.samples, self.loaded.root, repository)

    def check_solutions(self, repository: ArtifactRepository | None) -> list[str]:
        """Solve a task of each environment of nodes to be computed; see preflight/solutions.py."""
        return check_solutions(self.graph, self.seen.samples, self.loaded.root, repository)

    def calibration_notes(self, repository: ArtifactRepository | None) -> list[str]:
        """Say how far the judges of rubrics agree with people; see preflight/calibrations.py."""
        return calibration_notes(self.graph, repository)

    def try_out(self, repository: ArtifactRepository | None, *, call_functions: bool = True) -> list[str]:
        """Return the notes of all of these. call_functions: whether code of the user's runs."""
        notes = [*self.calibration_notes(repository), *self.ask_servers(repository)]
        if call_functions:
            notes += self.call_functions(repository)
            notes += self.check_answers(repository)
            notes += self.check_solutions(repository)
        return notes

    def require_single_run(self) -> None:
        """Raise RecipeError for a loop: its rounds are counted, and their prompts are used once."""
        name = self.loaded.recipe.name
        if self.loaded.recipe.loop is not None:
            raise RecipeError(f"the recipe {name} is a loop: `alignment loop` runs its rounds")

    def require_loop(self) -> None:
        """Raise RecipeError for a recipe without rounds."""
        require_loop(self.loaded.recipe)


@dataclass(frozen=True, slots=True)
class Prepared(Checked):
    """A checked recipe, and the store of its results."""

    store: Store
    repository: ArtifactRepository


def check(
    recipe: str,
    overrides: Sequence[str],
    resolved: dict[str, str] | None = None,
    store: str | None = None,
    start: RoundStart | None = None,
    rerun: Rerun | None = None,
) -> Checked:
    """Check a recipe. Reads the store only if the recipe names an artifact of it, or is a loop.

    resolved: artifacts and remote sources looked up before; extended in place.
    store: its URL; none: the store of the environment.
    start: the loop's round; none: the next one. rerun: a node to compute again.
    Raises RecipeError for mistakes in the recipe, StoreError if the store is needed and cannot be read.
    """
    loaded = load_recipe(recipe, overrides)
    pinned = {} if resolved is None else resolved

    def find(ref: str) -> Manifest:
        name = f"artifact:{ref}"
        try:
            manifest = ArtifactRepository(_opened(store)).find(pinned.get(name, ref))
        except StoreError as error:
            raise RecipeError(str(error)) from error
        pinned[name] = manifest.ref.full
        return manifest

    if start is None and loaded.recipe.loop is not None and (store or os.environ.get(STORE_VARIABLE)):
        start = Rounds(_opened(store), loaded.recipe.name).current()
    if start is not None:
        require_loop(loaded.recipe)  # it may have been taken out between two rounds
    drafts = outline(loaded.recipe, find, start)
    seen = look(loaded, drafts)
    graph = build_graph(loaded, node_libraries(), drafts, pinned, rerun)
    notes = list(dict.fromkeys([*loaded.notes, *effect_notes(loaded.recipe, drafts.nodes), *seen.notes]))
    if start is not None:
        notes += check_round(loaded.recipe, graph, start, seen.rows, ArtifactRepository(_opened(store)))
    return Checked(loaded, graph, drafts.left_out, seen, notes, start)


def prepare(
    recipe: str,
    overrides: Sequence[str],
    pins: str = "",
    store: str | None = None,
    start: RoundStart | None = None,
    *,
    rerun: Rerun | None = None,
    call_functions: bool = True,
) -> Prepared:
    """Run `check`, probe the store at the URL `store`, or the environment's, and try out what the nodes to be computed
    call.

    pins: path in the store with the versions of aliases, branches and files at the first start of a run, or a round,
    for its retries; empty: none.
    """
    resolved: dict[str, str] = {}
    if pins and (kept := _opened(store).get(pins)) is not None:
        resolved = json.loads(kept)
    checked = check(recipe, overrides, resolved, store, start, rerun)
    opened = _opened(store)
    opened.probe()
    if pins and resolved:
        opened.put(pins, json.dumps(resolved, indent=1).encode())
    repository = ArtifactRepository(opened)
    notes = [*checked.notes, *checked.try_out(repository, call_functions=call_functions)]
    return Prepared(
        checked.loaded, checked.graph, checked.left_out, checked.seen, notes, checked.start,
        opened, repository,
    )  # fmt: skip


def _opened(url: str | None) -> Store:
    """Return the store at `url`, or the environment's. Raises StoreError if that names none."""
    return open_store(url or store_url())


def pins_path(run_id: str) -> str:
    """Return the path of the pins of a run that is no round."""
    return f"runs/{run_id}/pins.json"
