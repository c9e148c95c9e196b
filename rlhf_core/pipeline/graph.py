"""A recipe becomes a graph of nodes; each is one stage with its settings, its inputs, and the key of its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.stage import StageConfig
from rlhf_core.contract import Stage
from rlhf_core.pipeline.loading import LoadedRecipe
from rlhf_core.pipeline.outline import Draft, Outline, outline
from rlhf_core.pipeline.user_files import user_files
from rlhf_core.stages.key import stage_key


@dataclass(frozen=True, slots=True)
class Node:
    name: str  # "data.text", "sft", "merge.rl", "evaluation.base", ...
    stage: Stage
    config: StageConfig
    inputs: Mapping[str, str]  # input name -> the node that makes it
    input_refs: Mapping[str, ArtifactRef]  # input name -> the artifact that this node makes
    user_files: Mapping[str, str]  # path as the recipe names it -> sha256
    ref: ArtifactRef


def build_graph(loaded: LoadedRecipe, libraries: Mapping[str, str], drafts: Outline | None = None) -> dict[str, Node]:
    """All nodes by name, each after those it reads.

    libraries: versions of the libraries that compute, by name; part of every key.
    drafts: the recipe's outline, where it is known already.
    Raises RecipeError where a setting names something that is not there, or a file cannot be read.
    """
    nodes: dict[str, Node] = {}
    for draft in (drafts or outline(loaded.recipe)).nodes.values():
        nodes[draft.name] = _node(draft, nodes, loaded.root, loaded.recipe.seed, libraries)
    return nodes


def _node(draft: Draft, nodes: Mapping[str, Node], root: Path, seed: int, libraries: Mapping[str, str]) -> Node:
    refs = {name: nodes[other].ref for name, other in draft.inputs.items()}
    files: Mapping[str, str] = {}
    if draft.existing is not None:
        ref = draft.existing.ref
    else:
        files = user_files(draft.config, root)
        key = stage_key(draft.stage, draft.config, inputs=refs, user_files=files, seed=seed, libraries=libraries)
        ref = ArtifactRef(stage=draft.stage.name, key=key)
    return Node(draft.name, draft.stage, draft.config, dict(draft.inputs), refs, files, ref)
