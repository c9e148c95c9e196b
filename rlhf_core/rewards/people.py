"""People's verdicts on completions by the criteria of a rubric, in the rows of a calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config.rewards.rubrics import Criterion
from rlhf_core.errors import RewardError, did_you_mean


def completion_of(row: Mapping[str, Any], column: str) -> str:
    """Return the completion of a row. Raises RewardError if it has none."""
    text = row.get(column)
    if not isinstance(text, str):
        raise RewardError(f"the column `{column}` has no completion: {str(text)[:80]}")
    return text


def verdicts_of(row: Mapping[str, Any], column: str, criteria: Sequence[Criterion]) -> dict[str, bool]:
    """Return people's verdicts by criterion; some may be without. Raises RewardError for other ones."""
    verdicts, names = row.get(column), [each.name for each in criteria]
    if not isinstance(verdicts, dict) or not verdicts:
        raise RewardError(f"the column `{column}` must map criteria to true or false, this is {str(verdicts)[:80]}")
    for name, met in verdicts.items():
        if name not in names:
            raise RewardError(
                f"`{column}.{name}` is not a criterion{did_you_mean(name, names)}; there are {', '.join(names)}"
            )
        if not isinstance(met, bool):
            raise RewardError(f"`{column}.{name}` is {met!r}, expected true or false")
    return verdicts
