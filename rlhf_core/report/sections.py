"""Sections of the pages about one stage: its curves, its settings, and in the report a sample of its rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.logged_rollouts import LoggedGroup, LoggedStep
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.report.charts import MOST_POINTS, Chart, curve_charts, grouped, marks
from rlhf_core.report.content import Curves
from rlhf_core.report.node_view import NodeView
from rlhf_core.report.rollouts import CompletionView, best_first, completion_view, lowest_first

_PROMPTS, _COMPLETIONS = 3, 4  # of a step in the report


@dataclass(frozen=True, slots=True)
class GroupSection:
    index: int  # in its step
    prompt: Sequence[Mapping[str, Any]]
    answer: str | None
    completions: Sequence[CompletionView]
    logged: int  # completions


@dataclass(frozen=True, slots=True)
class StepSection:
    step: int
    prompts: int
    completions: int
    groups: Sequence[GroupSection]


@dataclass(frozen=True, slots=True)
class StageSection:
    name: str
    state: str
    ref: str
    charts: Sequence[Chart]
    steps: Sequence[tuple[int, str]]  # logged steps, and where a page shows them
    marks: Sequence[Mapping[str, Any]]
    constants: Mapping[str, float]
    settings: str
    inputs: Sequence[tuple[str, str, str]]  # role, the stage of the run that made it or an empty text, artifact
    facts: Mapping[str, str]
    files: Sequence[tuple[str, int]]  # path, bytes
    rollouts: Sequence[StepSection] = ()


def stage_section(
    node: NodeView, curves: Curves, stages: Mapping[ArtifactRef, str], steps: Sequence[tuple[int, str]] = (),
    attempts: Sequence[Attempt] = (), most_points: int = MOST_POINTS,
) -> StageSection:  # fmt: skip
    """Return the section of a stage. stages: the names of the run's stages. attempts: of one without a manifest."""
    of_curves, manifest = grouped(curves), node.manifest
    charts = curve_charts(of_curves.charts, most_points)
    if manifest is None:
        return StageSection(
            node.name, node.state, str(node.ref), charts, steps, marks(attempts), of_curves.constants, "", (), {}, ()
        )
    return StageSection(
        node.name, node.state, str(node.ref), charts, steps, marks(manifest.attempts), of_curves.constants,
        settings=json.dumps(manifest.config, indent=1, ensure_ascii=False),
        inputs=[(role, stages.get(parent, ""), str(parent)) for role, parent in manifest.parents.items()],
        facts={
            "seed": "nothing was drawn" if manifest.seed is None else str(manifest.seed),
            "code": manifest.code_revision,
            "device": f"{manifest.device}, {manifest.device_seconds:.1f} device seconds",
        },
        files=[(file.path, file.size) for file in manifest.files],
    )  # fmt: skip


def step_section(step: LoggedStep, most_tokens: int) -> StepSection:
    """Return a sample of a step: prompts with the lowest rewards, of each the best and the worst completions."""
    groups = [_group_section(index, group, most_tokens) for index, group in lowest_first(step.groups)[:_PROMPTS]]
    return StepSection(step.step, step.prompts, step.completions, groups)


def _group_section(index: int, group: LoggedGroup, most_tokens: int) -> GroupSection:
    ordered = [number for number, _ in best_first(group)]
    half = _COMPLETIONS // 2
    chosen = ordered if len(ordered) <= _COMPLETIONS else [*ordered[:half], *ordered[-half:]]
    completions = [completion_view(group, number, most_tokens) for number in chosen]
    return GroupSection(index, list(group.prompt), group.answer, completions, len(ordered))
