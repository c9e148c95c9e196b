"""Rewards that check an answer: 1 if it is right, 0 if it is wrong (tasks of reasoning-gym may give parts)."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config.rewards import VerifierReward
from rlhf_core.contract import StageContext
from rlhf_core.data.formats import normalised
from rlhf_core.data.reasoning import score
from rlhf_core.errors import RewardError
from rlhf_core.rewards.base import RewardResult, checked_result


class Verifier:
    @classmethod
    def of(cls, config: VerifierReward, context: StageContext) -> Verifier:
        return cls(config)

    def __init__(self, config: VerifierReward):
        self._judge = {"exact": _exact, "reasoning_gym": _reasoning_gym}[config.kind]
        self._name = f"verifier {config.kind}"
        self._pattern = None if config.pattern is None else re.compile(config.pattern)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        values = []
        for index, (completion, row) in enumerate(zip(completions, rows, strict=True)):
            answer = self._answer(completion)
            try:
                value = 0.0 if answer is None else self._judge(answer, row)
            except KeyError as error:
                raise RewardError(
                    f"{self._name}, completion {index}: the dataset row {row.get('id')} has no column {error}"
                ) from error
            except Exception as error:  # the scorer of a task may raise anything
                raise RewardError(
                    f"{self._name}, completion {index} ({completion!r}) raised:\n{traceback.format_exc()}"
                ) from error
            values.append({"reward": value, "score": value})
        return checked_result(values, len(completions), self._name)

    def close(self) -> None:
        pass

    def _answer(self, completion: str) -> str | None:
        """The last answer in a completion; None if there is none."""
        if self._pattern is None:
            return completion
        answers = [match.group(1) for match in self._pattern.finditer(completion)]
        return answers[-1] if answers else None


def _exact(answer: str, row: Mapping[str, Any]) -> float:
    return float(normalised(answer) == normalised(str(row["answer"])))


def _reasoning_gym(answer: str, row: Mapping[str, Any]) -> float:
    return score(row["task"], answer.strip(), row)
