"""The gates of a run: their candidates in the registry, and their verdicts in the Prefect UI and in notifications."""

from __future__ import annotations

from collections.abc import Mapping

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from flows.notifications import notify
from rlhf_core.config.notify import Event
from rlhf_core.graph.graph import Node
from rlhf_core.pipeline.gates import Judged, settle_gates
from rlhf_core.pipeline.prepare import Prepared


def settle(prepared: Prepared, nodes: Mapping[str, Node], run_id: str) -> None:
    """Move the candidates by the run's passed gates, also if another stage failed, and tell all verdicts."""
    judged = list(settle_gates(nodes.values(), prepared.repository, run_id))
    recipe = prepared.loaded.recipe
    for each in judged:
        get_run_logger().info("%s %s: %s", each.node, "passed" if each.gate.passed else "refused", each.gate.reason)
        event = event_of(each)
        if event is not None:
            notify(
                event, f"{each.node}: {each.gate.candidate}: {each.gate.reason}", recipe.notify, recipe=recipe.name,
                store=prepared.store, run_id=run_id, say=get_run_logger().warning,
            )  # fmt: skip
    if judged:
        text = "\n\n".join(line for each in judged for line in each.lines())
        create_markdown_artifact(text, key="gates", description="Verdicts of the gates, and what waits for a person")


def event_of(judged: Judged) -> Event | None:
    """Return the event that a verdict is; None if it moved nothing in this run and waits for no approval."""
    if not judged.gate.passed:
        return "refused"
    if judged.waits:
        return "waiting_for_approval"
    return "promoted" if judged.is_new else None
