"""Notes on the judges of rubrics: how far each agrees with people."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.rewards.rewards import Rubric
from rlhf_core.graph.graph import Node


def calibration_notes(graph: Mapping[str, Node], repository: ArtifactRepository | None) -> list[str]:
    """Return a note for each rubric: the agreement of its judge with people, or that it is not known.

    repository: has the results of calibrations; None: there is no store.
    """
    notes = []
    for node in graph.values():
        for judged in node.config.judges():
            if isinstance(judged.judge, Rubric):
                setting = f"{judged.setting}.calibration"
                calibration = graph[node.inputs[setting]] if setting in node.inputs else None
                section = node.name.partition(".")[0]
                notes.append(f"{section}.{judged.setting}: {_said(judged.judge, calibration, repository)}")
    return list(dict.fromkeys(notes))


def _said(rubric: Rubric, calibration: Node | None, repository: ArtifactRepository | None) -> str:
    if calibration is None:
        return (
            f"the judge {rubric.model} is not calibrated: compare it with people's verdicts by a stage `calibration`, "
            "and name that here"
        )
    manifest = None if repository is None else repository.manifest(calibration.ref)
    if manifest is None:
        return f"the judge {rubric.model} is calibrated by `{calibration.name}` first"
    return f"the judge {rubric.model} {_agreement(manifest)}"


def _agreement(manifest: Manifest) -> str:
    found = manifest.metrics
    kappa, low, high = (found.get(name) for name in ("kappa", "kappa_low", "kappa_high"))
    of_kappa = (
        f"with a kappa of {kappa:.2f} ({low:.2f} to {high:.2f})"
        if isinstance(kappa, float) and isinstance(low, float) and isinstance(high, float)
        else "without a kappa, since all verdicts are the same"
    )
    share = found.get("agreement")
    assert isinstance(share, int | float)
    return f"agrees with people {of_kappa}, on {share:.0%} of {found['verdicts']} verdicts of {found['rows']} rows"
