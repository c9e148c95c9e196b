"""Runs the checks of stages: each stage's own function, called for each of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from rlhf_core.data.sources.base import Located
from rlhf_core.graph.drafting import Draft
from rlhf_core.preflight.model import BaseModel
from rlhf_core.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Note:
    """A message that is not an error. A check yields problems as plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class CheckContext:
    """The recipe, and all of its inputs that are readable without running anything."""

    recipe: Recipe
    root: Path  # its folder
    nodes: Mapping[str, Draft]
    samples: Mapping[str, list[Located]]  # by dataset in `data`: the rows that could be read, of those that could
    rows: Mapping[str, int]  # of each dataset in `data` whose rows could be counted
    models: Mapping[str, BaseModel]  # by node, of those whose base model is at hand


def check_stages(context: CheckContext) -> tuple[list[str], list[str]]:
    """Return the problems and the notes of all nodes."""
    problems, notes = [], []
    for node in context.nodes.values():
        for finding in resolve_name(node.stage.checks)(node.config, node, context) if node.stage.checks else ():
            if isinstance(finding, Note):
                notes.append(finding.text)
            else:
                problems.append(finding)
    return problems, notes
