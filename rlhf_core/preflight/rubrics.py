"""Preflight checks of rubrics: their criteria, the judge's prompt, and whose judge a calibration has compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.rewards.rewards import GroupReward, Rubric, TextReward
from rlhf_core.config.rewards.rubrics import Criterion
from rlhf_core.config.stages.calibration import CalibrationConfig
from rlhf_core.data.sources.base import Located
from rlhf_core.errors import RewardError
from rlhf_core.graph.drafting import Draft
from rlhf_core.preflight.texts import text_problem
from rlhf_core.rewards.criteria import criteria_of_row, read_rubric, require_weight
from rlhf_core.rewards.rubric import written


def check_rubrics(nodes: Mapping[str, Draft], samples: Mapping[str, list[Located]], root: Path) -> Iterator[str]:
    """Yield the problems of rewards and scorers that are rubrics. samples: the readable rows of each dataset."""
    for node in nodes.values():
        datasets = {setting.path: setting.names[0] for setting in node.input_settings if setting.names}
        for judged in node.config.judges():
            if isinstance(rubric := judged.judge, Rubric):
                rows = samples.get(datasets[judged.dataset], []) if judged.dataset else []
                place = f"{node.section}.{judged.setting}"
                with_criteria = [each for each in rows if rubric.column is None or rubric.column in each[1]]
                yield from rubric_problems(rubric, with_criteria, place, root)  # a missing column is check_rewards'
                if rubric.calibration is not None:
                    calibration = nodes[node.inputs[f"{judged.setting}.calibration"]]
                    problem = _another_judge(rubric, calibration, root)
                    yield from () if problem is None else (f"{place}.calibration: {problem}",)


def rubric_problems(rubric: Rubric, rows: Sequence[Located], place: str, root: Path) -> Iterator[str]:
    """Yield the problems of one rubric. rows: that it judges. place: its setting."""
    shared: tuple[Criterion, ...] = ()
    try:
        if rubric.path is not None:
            shared = read_rubric(root / rubric.path)
            if rubric.column is None:
                require_weight(shared)
    except RewardError as error:
        yield f"{place}.path: {rubric.path}: {error}"
        return
    if rubric.column is not None:
        for where, row in rows:
            try:
                require_weight([*shared, *criteria_of_row(row, rubric.column)])
            except RewardError as error:
                yield f"{place}.column: {where}: {error}"
                return
    if rubric.template is not None:
        texts = {"answers": "[answer_1]\nyes", "criteria": written(shared) or "[criterion_1] right"}
        tolerates = isinstance(rubric, TextReward | GroupReward) and rubric.tolerated_failures > 0
        problem = text_problem(rubric.template, list(rows), texts, tolerates=tolerates)
        yield from () if problem is None else (f"{place}.template: {problem}",)


def _another_judge(rubric: Rubric, calibration: Draft, root: Path) -> str | None:
    """Return a problem if the stage compares another judge with people than the rubric's."""
    settings = rubric.judge_settings()
    if isinstance(calibration.config, CalibrationConfig):
        other: Mapping[str, Any] = calibration.config.reward.judge_settings()
    elif calibration.existing is not None:
        other = calibration.existing.config.get("reward", {})
        if rubric.path is not None:
            digest = hashlib.sha256((root / rubric.path).read_bytes()).hexdigest()
            if calibration.existing.user_files.get(rubric.path) != digest:
                return f"{calibration.existing.ref} is of another version of {rubric.path}: calibrate this one"
    else:
        return None
    different = [name for name, value in settings.items() if other.get(name) != value]
    if not different:
        return None
    return (
        f"`{calibration.name}` compares another judge with people, with a different {', '.join(different)}: give both "
        "the same settings"
    )
