"""Rewards that verify an answer: 1 if it is right, 0 if it is wrong (tasks of reasoning-gym may give parts).

Search and scoring depend on the policy's text, so both have a time limit: a pattern may backtrack for ever, and a
scorer may evaluate `9**9**9`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import regex

from rlhf_core.config.rewards.rewards import VerifierReward
from rlhf_core.contract import StageContext
from rlhf_core.data.formats import normalised
from rlhf_core.errors import RewardError, shortened
from rlhf_core.processes.user_process import UserFunction, UserProcess
from rlhf_core.rewards.base import RewardResult, checked_result, tolerated

_GYM_SCORES = Path(__file__).parent / "isolated" / "gym_scores.py"
_QUOTED = 200  # characters of a completion in an error


class Verifier:
    @classmethod
    def of(cls, config: VerifierReward, context: StageContext) -> Verifier:
        return cls(config)

    def __init__(self, config: VerifierReward):
        self._config = config
        self._name = f"verifier {config.kind}"
        self._pattern = None if config.pattern is None else regex.compile(config.pattern)
        # In a process of its own, as a user's function: it evaluates expressions of the policy.
        scorer = UserFunction(_GYM_SCORES, "score_one", self._name, ("task", "answer", "row"))
        self._scorer = UserProcess(scorer)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        share = self._config.tolerated_failures
        values: list[Any] = []
        for index, (completion, row) in enumerate(zip(completions, rows, strict=True)):
            values += tolerated(share, 1, self._values, index, completion, row)
        return checked_result(values, len(completions), self._name, share)

    def finds_an_answer(self, completion: str) -> bool:
        """Return whether the pattern finds an answer, right or wrong, in a completion."""
        return self._answer(completion) is not None

    def close(self) -> None:
        self._scorer.close()

    def _values(self, index: int, completion: str, row: Mapping[str, Any]) -> list[Any]:
        quoted = repr(shortened(completion, _QUOTED))
        try:
            answer = self._answer(completion)
            value = 0.0 if answer is None else self._judged(answer, row)
        except KeyError as error:
            raise RewardError(
                f"{self._name}, completion {index}: the dataset row {row.get('id')} has no column {error}"
            ) from error
        except TimeoutError as error:
            raise RewardError(
                f"{self._name}, completion {index} ({quoted}): the pattern {self._config.pattern!r} did not end "
                f"within {self._config.timeout_seconds:g} s: rewrite it; it repeats what repeats, as (a+)+ does"
            ) from error
        except RewardError as error:  # the scorer of a task may raise anything
            raise RewardError(f"{self._name}, completion {index} ({quoted}): {error}") from error
        return [{"reward": value, "score": value}]

    def _judged(self, answer: str, row: Mapping[str, Any]) -> float:
        if self._config.kind == "exact":
            return float(normalised(answer) == normalised(str(row["answer"])))
        reply = self._scorer.call([row["task"], answer.strip(), dict(row)], self._config.timeout_seconds)
        (value,) = reply["values"]
        return float(value)

    def _answer(self, completion: str) -> str | None:
        """Return the last answer in a completion; None if there is none."""
        if self._pattern is None:
            return completion
        matches = self._pattern.finditer(completion, timeout=self._config.timeout_seconds)
        answers = [match.group(1) for match in matches]
        return answers[-1] if answers else None
