"""Which artifacts of a run are its models, and the commands that use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.graph.graph import Node

MODELS = frozenset({Kind.BASE_MODEL, Kind.POLICY, Kind.ADAPTER, Kind.REWARD_MODEL})


def final_models(graph: Mapping[str, Node]) -> list[Node]:
    """Those that the recipe made, and of which it made no other one; a reward model is made beside a policy."""
    made: list[Node] = []
    before: dict[str, set[str]] = {}  # of each node all that it depends on
    for node in graph.values():
        before[node.name] = set(node.inputs.values()).union(*(before[name] for name in node.inputs.values()))
        if node.stage.entry and node.inputs and node.stage.writes <= MODELS:  # what has no inputs was there before
            used = before[node.name]
            made = [other for other in made if other.name not in used or (_rewards(node) and not _rewards(other))]
            made.append(node)
    return made


def model_lines(graph: Mapping[str, Node]) -> Iterator[tuple[str, str]]:
    """The artifact of each model, and the commands for the last one, which is a policy where there is one."""
    models = final_models(graph)
    for node in models:
        yield "model", f"{node.ref} ({node.name})"
    for node in ([model for model in models if not _rewards(model)] or models)[-1:]:
        if _rewards(node):
            yield "  serve it", f"alignment serve-reward {node.ref}"
        else:
            yield "  talk with it", f"alignment chat {node.ref}"
            yield "  serve it", f"alignment serve {node.ref}"
        yield "  copy it", f"alignment pull {node.ref}"


def _rewards(node: Node) -> bool:
    return node.stage.writes == {Kind.REWARD_MODEL}
