"""Calibration: completions with people's verdicts in, the agreement of a rubric's judge with them out. Imports no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import Kind, MetricValue
from rlhf_core.config.rewards.rewards import GroupReward, GroupRubricReward, TextReward
from rlhf_core.config.stages.calibration import CalibrationConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.formats import Row
from rlhf_core.data.reading import read_rows
from rlhf_core.errors import RewardError, StageError
from rlhf_core.evaluation.agreement import Agreement, Verdict, agreement
from rlhf_core.evaluation.intervals import Estimate
from rlhf_core.rewards.base import TextGroup
from rlhf_core.rewards.people import completion_of, verdicts_of
from rlhf_core.rewards.rubric import RubricJudge, Verdicts


@dataclass(frozen=True, slots=True)
class _Compared:
    row: Row
    judge: Mapping[str, bool]  # criterion -> whether the completion meets it
    people: Mapping[str, bool]  # of some of the criteria

    def verdicts(self, criterion: str | None = None) -> list[Verdict]:
        """Return the verdicts on one criterion; None: on all."""
        return [(self.judge[name], met) for name, met in self.people.items() if criterion in (None, name)]


def run(config: CalibrationConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Write `calibration.json`, and `verdicts.jsonl` with a line for each row.

    Raises StageError for a row without valid verdicts, if the judge fails for more than its tolerated share, or agrees
    less than `least_kappa`.
    """
    rows = read_rows(inputs["dataset"].folder)
    assert isinstance(config.reward, TextReward | GroupReward)
    share = config.reward.tolerated_failures
    context.progress(0, len(rows), "judge")
    with closing(RubricJudge(config.reward, context, share)) as judge:
        groups = list(_groups(config, rows))
        judged = judge([group for group, _ in groups])
        shared = [each.name for each in judge.shared]
    ordered = [row for _, of_group in groups for row in of_group]
    failures = [each for each in judged if isinstance(each, RewardError)]
    if len(failures) > share * len(rows):
        raise StageError(f"the judge failed for {len(failures)} of {len(rows)} rows; the first: {failures[0]}")
    compared = [
        _Compared(row, *_verdicts(config, row, each))
        for row, each in zip(ordered, judged, strict=True)
        if isinstance(each, Verdicts)
    ]
    whole = agreement(each.verdicts() for each in compared)
    of_criteria = {
        name: agreement(each.verdicts(name) for each in compared)
        for name in shared
        if any(name in each.people for each in compared)
    }
    folder = context.workdir / "calibration"
    _write(folder, compared, whole, of_criteria)
    metrics: dict[str, MetricValue] = {"failures": len(failures), **_metrics("", whole)}
    for name, each_agreement in of_criteria.items():
        metrics |= _metrics(f"{name}/", each_agreement)
    context.log(0, {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)})
    _require(config, whole, context.name)
    return Output(Kind.CALIBRATION, folder, metrics)


def _write(folder: Path, compared: Sequence[_Compared], whole: Agreement, of_criteria: Mapping[str, Agreement]) -> None:
    folder.mkdir()
    document = {"all": _document(whole), "criteria": {name: _document(each) for name, each in of_criteria.items()}}
    (folder / "calibration.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with (folder / "verdicts.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for each in compared:
            line = {"id": each.row["id"], "judge": dict(each.judge), "people": dict(each.people)}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _groups(config: CalibrationConfig, rows: Sequence[Row]) -> Iterator[tuple[TextGroup, list[Row]]]:
    """Yield what the judge sees in a call, and the rows in it: with a rubric of groups, all of one prompt."""

    def prompt(row: Row) -> str:
        return json.dumps(row["prompt"], sort_keys=True) if isinstance(config.reward, GroupRubricReward) else row["id"]

    for _, grouped in groupby(sorted(rows, key=prompt), key=prompt):
        of_group = list(grouped)
        completions = [_completion(config, row) for row in of_group]
        yield TextGroup(completions, str(of_group[0]["prompt"][-1]["content"]), of_group[0]), of_group


def _completion(config: CalibrationConfig, row: Row) -> str:
    try:
        return completion_of(row, config.completion)
    except RewardError as error:
        raise StageError(f"row {row['id']}: {error}") from error


def _verdicts(config: CalibrationConfig, row: Row, judged: Verdicts) -> tuple[dict[str, bool], dict[str, bool]]:
    try:
        people = verdicts_of(row, config.verdicts, judged.criteria)
    except RewardError as error:
        raise StageError(f"row {row['id']}: {error}") from error
    return {each.name: met for each, met in zip(judged.criteria, judged.met, strict=True)}, people


def _document(compared: Agreement) -> dict[str, Any]:
    return {**asdict(compared), "verdicts": compared.verdicts}


def _metrics(prefix: str, compared: Agreement) -> dict[str, MetricValue]:
    """Return rows and verdicts, and agreement and kappa with the ends of their intervals as `_low` and `_high`."""
    estimates: dict[str, Estimate | None] = {"agreement": compared.agreement, "kappa": compared.kappa}
    metrics: dict[str, MetricValue] = {f"{prefix}rows": compared.rows, f"{prefix}verdicts": compared.verdicts}
    for name, estimate in estimates.items():
        low, high = (None, None) if estimate is None else (estimate.low, estimate.high)
        metrics |= {
            f"{prefix}{name}": None if estimate is None else estimate.value,
            f"{prefix}{name}_low": low, f"{prefix}{name}_high": high,
        }  # fmt: skip
    return metrics


def _require(config: CalibrationConfig, compared: Agreement, name: str) -> None:
    """Raise StageError if the judge agrees too little with people."""
    least, kappa = config.least_kappa, compared.kappa
    if least is None or (kappa is not None and kappa.low >= least):
        return
    found = "has no kappa, since all verdicts are the same" if kappa is None else (
        f"agrees with people by a kappa of {kappa.value:.2f} ({kappa.low:.2f} to {kappa.high:.2f})"
    )  # fmt: skip
    raise StageError(
        f"{name}: the judge {config.reward.model} {found} on {compared.verdicts} verdicts of {compared.rows} rows, and "
        f"least_kappa is {least:g}: rewrite its criteria, take another model, or label more rows"
    )
