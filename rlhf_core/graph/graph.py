"""A recipe as a graph of nodes: each is one stage with its settings, its inputs, and the key of its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.contract import Stage
from rlhf_core.errors import RecipeError, did_you_mean
from rlhf_core.graph.drafting import Draft
from rlhf_core.graph.outline import Outline, outline
from rlhf_core.graph.pins import pins
from rlhf_core.graph.plugins import plugins_of
from rlhf_core.graph.rerun import Rerun
from rlhf_core.graph.user_files import user_files
from rlhf_core.recipe.loading import LoadedRecipe
from rlhf_core.stages.key import stage_key, used_libraries


@dataclass(frozen=True, slots=True)
class Node:
    name: str  # "data.text", "sft", "merge.rl", "evaluation.base", ...
    stage: Stage
    config: StageConfig
    inputs: Mapping[str, str]  # input name -> the node that makes it
    input_refs: Mapping[str, ArtifactRef]  # input name -> the artifact that this node makes
    user_files: Mapping[str, str]  # path as the recipe names it -> sha256
    pins: Mapping[str, str]  # URL of a remote source -> its content's identity
    seed: int | None  # of its random numbers; None: it draws none
    ref: ArtifactRef
    libraries: Mapping[str, str] = field(default_factory=dict)  # that compute it, its plugins among them
    plugins: Mapping[str, str] = field(default_factory=dict)  # that it uses -> version
    rerun: str = ""  # label of a computation that is repeated on purpose
    after: tuple[str, ...] = ()  # nodes that must have succeeded before, though it does not read their results


def build_graph(
    loaded: LoadedRecipe,
    libraries: Mapping[str, str],
    drafts: Outline | None = None,
    resolved: dict[str, str] | None = None,
    rerun: Rerun | None = None,
) -> dict[str, Node]:
    """Return all nodes by name, each after its inputs.

    libraries: versions of the libraries that compute, by name; part of every key, as a node's plugins are of its own.
    drafts: the recipe's outline, if it was drafted before. resolved: see `pins`. rerun: a node that is computed again.
    Raises RecipeError if a setting names a missing input, a source cannot be read, or no job computes the node `rerun`.
    """
    nodes: dict[str, Node] = {}
    pinned = {} if resolved is None else resolved
    all_drafts = (drafts or outline(loaded.recipe)).nodes
    for draft in all_drafts.values():
        if draft.existing is not None:
            nodes[draft.name] = Node(draft.name, draft.stage, draft.config, {}, {}, {}, {}, None, draft.existing.ref)
        elif not draft.stage.entry:  # the result of the node that it reads, by another name
            same = nodes[draft.inputs["model"]].ref
            nodes[draft.name] = Node(draft.name, draft.stage, draft.config, dict(draft.inputs), {}, {}, {}, None, same)
        else:
            label = rerun.label if rerun is not None and rerun.node == draft.name else ""
            nodes[draft.name] = _node(draft, nodes, loaded, libraries, pinned, plugins_of(draft, all_drafts), label)
    if rerun is not None and not any(node.rerun for node in nodes.values()):
        computed = {name: node for name, node in nodes.items() if node.libraries}
        raise RecipeError(
            f"`{rerun.node}` cannot be run again{did_you_mean(rerun.node, computed)}; "
            f"what {loaded.recipe.name} computes is {', '.join(computed)}"
        )
    return nodes


def _node(
    draft: Draft,
    nodes: Mapping[str, Node],
    loaded: LoadedRecipe,
    libraries: Mapping[str, str],
    resolved: dict[str, str],
    plugins: Mapping[str, str],
    rerun: str,
) -> Node:
    refs = {name: nodes[other].ref for name, other in draft.inputs.items()}
    files = user_files(draft.config, loaded.root)
    try:
        sources = pins(draft.config, resolved, loaded.root)
    except RecipeError as error:
        raise RecipeError(f"{draft.section}: {error}") from error
    seed = draft.config.seed_of(loaded.recipe.seed)
    libraries = used_libraries(draft.config, {**libraries, **plugins})
    key = stage_key(
        draft.stage, draft.config,
        inputs=refs, user_files=files, pins=sources, seed=seed, libraries=libraries, rerun=rerun,
    )  # fmt: skip
    ref = ArtifactRef(stage=draft.stage.name, key=key)
    return Node(
        draft.name, draft.stage, draft.config, dict(draft.inputs), refs, files, sources, seed, ref,
        libraries, plugins, rerun, draft.after,
    )  # fmt: skip
