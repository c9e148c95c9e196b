"""Rewards that verify an answer: 1 if it is right, 0 if it is wrong (tasks of reasoning-gym may give parts).

Search and scoring depend on the policy's text, so both have a time limit: a pattern may backtrack for ever, and a
scorer may evaluate `9**9**9`. VERIFIERS of config/rewards/verifiers.py lists the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

import regex

from rlhf_core.config.rewards.rewards import VerifierReward
from rlhf_core.config.rewards.verifiers import VerifierConfig
from rlhf_core.contract import StageContext
from rlhf_core.data.formats import normalised
from rlhf_core.errors import RewardError, shortened
from rlhf_core.processes.user_process import UserFunction, UserProcess
from rlhf_core.rewards.base import RewardResult, checked_result, tolerated

_GYM_SCORES = Path(__file__).parent / "isolated" / "gym_scores.py"
_QUOTED = 200  # characters of a completion in an error


class Judge(Protocol):
    """Decides whether an answer is right. `of(config)`, a class method, makes one from the verifier's settings."""

    workers: int  # threads that call `judge` at the same time
    metrics: tuple[str, ...]  # logged beside the reward; 0 if not returned

    def judge(self, answer: str, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the `reward`, 0-1, and metrics. Raises RewardError; KeyError for a column that the row lacks."""

    def close(self) -> None:
        """End its processes."""


class Verifier:
    @classmethod
    def of(cls, config: VerifierReward, context: StageContext) -> Verifier:
        return cls(config)

    def __init__(self, config: VerifierReward):
        self._config = config
        self._name = f"verifier {config.kind}"
        self._pattern = None if config.pattern is None else regex.compile(config.pattern)
        self._judge: Judge = resolve_name(config.verifier.implementation).of(config)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        share = self._config.tolerated_failures

        def values(index: int) -> list[Any]:
            return tolerated(share, 1, self._values, index, completions[index], rows[index])

        judged = [value for found in self._mapped(values, range(len(completions))) for value in found]
        return checked_result(judged, len(completions), self._name, share)

    def _mapped(self, function: Callable[[int], list[Any]], indexes: range) -> Iterator[list[Any]]:
        """Yield `function` of each index, in their order."""
        if self._judge.workers == 1:
            yield from map(function, indexes)
            return
        with ThreadPoolExecutor(self._judge.workers) as pool:
            yield from pool.map(function, indexes)  # the first error cancels those that have not begun

    def finds_an_answer(self, completion: str) -> bool:
        """Return whether the pattern finds an answer, right or wrong, in a completion."""
        return self._answer(completion) is not None

    def close(self) -> None:
        self._judge.close()

    def _values(self, index: int, completion: str, row: Mapping[str, Any]) -> list[Any]:
        quoted = repr(shortened(completion, _QUOTED))
        try:
            answer = self._answer(completion)
            judged = {"reward": 0.0} if answer is None else self._judge.judge(answer, row)
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
        return [dict.fromkeys(self._judge.metrics, 0.0) | judged | {"score": judged["reward"]}]

    def _answer(self, completion: str) -> str | None:
        """Return the last answer in a completion; None if there is none."""
        if self._pattern is None:
            return completion
        matches = self._pattern.finditer(completion, timeout=self._config.timeout_seconds)
        answers = [match.group(1) for match in matches]
        return answers[-1] if answers else None


class ExactAnswers:
    """The same text as the row's `answer`."""

    workers, metrics = 1, ()

    @classmethod
    def of(cls, config: VerifierConfig) -> ExactAnswers:
        return cls()

    def judge(self, answer: str, row: Mapping[str, Any]) -> dict[str, float]:
        return {"reward": float(normalised(answer) == normalised(str(row["answer"])))}

    def close(self) -> None:
        return None


class GymScores:
    """The score of the row's `task`, a task of reasoning-gym."""

    workers, metrics = 1, ()

    @classmethod
    def of(cls, config: VerifierConfig) -> GymScores:
        return cls(config.timeout_seconds)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # In a process of its own, as a user's function: it evaluates expressions of the policy.
        scorer = UserFunction(_GYM_SCORES, "score_one", "verifier reasoning_gym", ("task", "answer", "row"))
        self._scorer = UserProcess(scorer)

    def judge(self, answer: str, row: Mapping[str, Any]) -> dict[str, float]:
        reply = self._scorer.call([row["task"], answer.strip(), dict(row)], self._seconds)
        (value,) = reply["values"]
        return {"reward": float(value)}

    def close(self) -> None:
        self._scorer.close()
