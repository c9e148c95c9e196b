"""The models among a run's artifacts, and the commands that use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.graph.graph import Node

MODELS = frozenset({Kind.BASE_MODEL, Kind.POLICY, Kind.ADAPTER, Kind.REWARD_MODEL})


def final_models(graph: Mapping[str, Node]) -> list[Node]:
    """Return the recipe's models from which it made no other one; a reward model counts apart from policies."""
    models: list[Node] = []
    before: dict[str, set[str]] = {}  # of each node all that it depends on
    for node in graph.values():
        before[node.name] = set(node.inputs.values()).union(*(before[name] for name in node.inputs.values()))
        if node.stage.entry and node.inputs and node.stage.writes <= MODELS:  # a stage without inputs made nothing new
            used = before[node.name]
            models = [other for other in models if other.name not in used or (_rewards(node) and not _rewards(other))]
            models.append(node)
    return models


def model_lines(graph: Mapping[str, Node]) -> Iterator[tuple[str, str]]:
    """Yield the artifact of each model, and the commands for the last one, which is a policy if there is one."""
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
