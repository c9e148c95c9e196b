"""A recipe's graph without keys: the nodes and their inputs by name. Keys are added in graph.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache

from rlhf_core.artifacts.rounds import RoundStart
from rlhf_core.config.inputs import input_settings, readable_roles
from rlhf_core.config.stages.outputs import ArtifactConfig
from rlhf_core.graph.drafting import Draft, Drafter, Find, asked_dataset
from rlhf_core.graph.round_drafting import RoundDrafter
from rlhf_core.recipe.recipe import Recipe, stage_of


@dataclass(frozen=True, slots=True)
class Outline:
    nodes: Mapping[str, Draft]  # each after those that it reads
    left_out: Mapping[str, str] = field(default_factory=dict)  # stages that the recipe has and no run needs: why


def outline(recipe: Recipe, find: Find | None = None, start: RoundStart | None = None) -> Outline:
    """Return the nodes of a recipe, or of one round of a loop.

    find: looks artifacts up; None: there is no store, and a stage `artifact` is an error.
    start: the state that the round starts from; None: it is the first.
    Raises RecipeError if a setting names a missing input, or one with another role.
    """
    find_once = None if find is None else cache(find)  # a second draft needs no second look-up in the store
    left_out: dict[str, str] = {}
    while True:
        nodes = _draft(recipe, find_once, left_out, start)
        unread = _unread(recipe, nodes, left_out)
        if not unread:
            return Outline(nodes, left_out)
        left_out |= unread


def _draft(recipe: Recipe, find: Find | None, left_out: Collection[str], start: RoundStart | None) -> dict[str, Draft]:
    stages = {name: config for name, config in recipe.stages.items() if name not in left_out}
    held_out = (setting for config in stages.values() for setting in input_settings(config) if setting.reads.held_out)
    tested = [asked_dataset(recipe, name) for setting in held_out for name in setting.names]
    loop = recipe.loop
    drafter = Drafter(recipe, find, tested) if loop is None else RoundDrafter(recipe, find, tested, loop, start)
    for name, config in stages.items():
        if isinstance(config, ArtifactConfig):
            drafter.find_artifact(name, config)
    for name, config in stages.items():
        drafter.add_stage(name, config)
    drafter.finish()
    return drafter.nodes


def _unread(recipe: Recipe, nodes: Mapping[str, Draft], left_out: Collection[str]) -> dict[str, str]:
    """Return auxiliary stages, such as reward models, that later stages could read and do not, with the reason."""
    read = {other for node in nodes.values() if not node.stage.reads_all for other in node.inputs.values()}
    names = [name for name in recipe.stages if name not in left_out]
    unread = {}
    for name in names:
        config = recipe.stages[name]
        if name in read or not stage_of(name, config).serves:
            continue
        later = names[names.index(name) + 1 :]
        able = [other for other in later if config.makes in readable_roles(type(recipe.stages[other]))]
        if able:
            unread[name] = f"{', '.join(able)} could use it, but {'do' if len(able) > 1 else 'does'} not"
    return unread
