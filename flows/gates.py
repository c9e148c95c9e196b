"""The gates of a run: their candidates in the registry, and their verdicts in the Prefect UI."""

from __future__ import annotations

from collections.abc import Mapping

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from rlhf_core.graph.graph import Node
from rlhf_core.pipeline.gates import settle_gates
from rlhf_core.pipeline.prepare import Prepared


def settle(prepared: Prepared, nodes: Mapping[str, Node], run_id: str) -> None:
    """Move the candidates by the run's passed gates, also if another stage failed, and show all verdicts."""
    judged = list(settle_gates(nodes.values(), prepared.repository, run_id))
    for each in judged:
        get_run_logger().info("%s %s: %s", each.node, "passed" if each.gate.passed else "refused", each.gate.reason)
    if judged:
        text = "\n\n".join(line for each in judged for line in each.lines())
        create_markdown_artifact(text, key="gates", description="Verdicts of the gates, and what waits for a person")
