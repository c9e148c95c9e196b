"""Criteria of rubrics: read from a file and from rows, and summed to a reward."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.config.rewards.rubrics import Criterion
from rlhf_core.errors import RewardError, one_line
from rlhf_core.system.json_text import JSONTextError, parse_json
from rlhf_core.system.listing import first_repeated
from rlhf_core.system.yaml_text import YAMLTextError, read_yaml_file

_METRIC = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_TAKEN = {"reward", "score", "steps", "met", "required_missed", "unreachable_servers"}  # names of other values
# Names of the same in data sets: Rubrics as Rewards and HealthBench. `tags` are not read.
_OTHER_NAMES = {"title": "name", "criterion": "description", "points": "weight"}
_UNREAD = {"tags"}


def read_rubric(file: Path) -> tuple[Criterion, ...]:
    """Return the `criteria` of a YAML or JSON file. Raises RewardError, without the file's name."""
    try:
        content = read_yaml_file(file)
    except YAMLTextError as error:
        raise RewardError(str(error)) from error
    if not isinstance(content, dict) or content.keys() != {"criteria"}:
        raise RewardError("expected a mapping with the key `criteria` alone, a list")
    criteria = _criteria(content["criteria"], "criteria")
    if unusable := next((each.name for each in criteria if not _METRIC.fullmatch(each.name)), None):
        raise RewardError(f"the name {unusable!r} is to be part of a metric's: up to 100 letters, digits and `_.-`")
    if taken := next((each.name for each in criteria if each.name in _TAKEN), None):
        raise RewardError(f"the name `{taken}` is that of another metric: choose another")
    return criteria


def criteria_of_row(row: Mapping[str, Any], column: str) -> tuple[Criterion, ...]:
    """Return the criteria in a column of a row: a list, or its JSON text. Those without a name have their number.

    Raises RewardError, which names the row.
    """
    value = row.get(column)
    try:
        return _criteria(parse_json(value) if isinstance(value, str) else value, f"`{column}`")
    except (JSONTextError, RewardError) as error:
        raise RewardError(f"row {row.get('id')}: {error}") from error


def require_weight(criteria: Sequence[Criterion]) -> None:
    """Raise RewardError if no completion could earn more than another."""
    if not any(each.weight > 0 for each in criteria):
        raise RewardError("no criterion has a weight above 0, so no completion could earn anything")


def total(criteria: Sequence[Criterion], met: Sequence[bool]) -> float:
    """Return the reward of a completion, from 0 to 1. met: by criterion.

    The weights of the criteria that are met, divided by the sum of the positive ones, and clipped, as HealthBench's
    score (arXiv:2505.08775, section 2); 0 if a required one is not met.
    """
    if any(each.required and not is_met for each, is_met in zip(criteria, met, strict=True)):
        return 0.0
    earned = math.fsum(each.weight for each, is_met in zip(criteria, met, strict=True) if is_met)
    return min(1.0, max(0.0, earned / math.fsum(each.weight for each in criteria if each.weight > 0)))


def _criteria(value: Any, where: str) -> tuple[Criterion, ...]:
    if not isinstance(value, list) or not value:
        raise RewardError(f"{where} must be a list of criteria, this is {str(value)[:80]}")
    criteria = tuple(_criterion(each, number, where) for number, each in enumerate(value, start=1))
    if (repeated := first_repeated([each.name for each in criteria])) is not None:
        raise RewardError(f"{where} has two criteria with the name {repeated!r}")
    return criteria


def _criterion(value: Any, number: int, where: str) -> Criterion:
    if not isinstance(value, Mapping):
        raise RewardError(f"{where}, criterion {number}: expected a mapping, this is {str(value)[:80]}")
    fields = {_OTHER_NAMES.get(name, name): item for name, item in value.items() if name not in _UNREAD}
    if len(fields) < len(value.keys() - _UNREAD):
        raise RewardError(f"{where}, criterion {number}: two names for one thing in {', '.join(map(str, value))}")
    try:
        return Criterion.model_validate_json(json.dumps({"name": str(number), **fields}))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        said = one_line(problem["msg"].removeprefix("Value error, "))
        raise RewardError(f"{where}, criterion {number}: {f'`{place}`: ' if place else ''}{said}") from error
