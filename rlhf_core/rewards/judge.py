"""Verdicts of a model behind an OpenAI-compatible endpoint: on single completions, as a reward, and on pairs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import regex

from rlhf_core.config.rewards.judges import ChatConfig, JudgeConfig, PairJudgeConfig
from rlhf_core.config.rewards.rewards import JudgeReward
from rlhf_core.contract import StageContext
from rlhf_core.data.sampled import Comparison, Outcome
from rlhf_core.errors import RewardError
from rlhf_core.rewards.base import RewardResult, checked_result, tolerated
from rlhf_core.rewards.servers import Servers
from rlhf_core.rewards.templates import TextTemplate
from rlhf_core.system.metering import METER

_QUOTED = 200  # characters of a reply in an error
_SEARCH_SECONDS = 10.0  # longest search of the pattern in one reply


@dataclass(frozen=True, slots=True)
class Question:
    """A turn of the user. `read` returns the verdict of a reply, and raises RewardError if it has none."""

    text: str
    read: Callable[[str], str]
    row: str = ""  # id of the row, for errors
    schema: Mapping[str, Any] | None = None  # JSON schema of the reply; None: it is text

    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps([self.text, self.schema]).encode()).digest()


class Judge:
    """Requests verdicts, several at a time, once per question: verdicts are cached in this process by the SHA-256 of
    text and schema for the lifetime of the judge (all steps of a stage), at some 200 bytes each.
    """

    def __init__(self, config: ChatConfig) -> None:
        self._config = config
        self.servers = Servers("judge", config, "/chat/completions")
        self._verdicts: dict[bytes, str] = {}

    def __call__(self, questions: Sequence[Question | RewardError], share: float) -> list[str | RewardError]:
        """Return the verdict on each question.

        share: tolerated share of failures; if it is above 0, an error takes the place of its verdict, else it is
        raised. An error among the questions is such a failure.
        """
        digests = [each if isinstance(each, RewardError) else each.digest() for each in questions]
        new = {
            digest: question
            for digest, question in zip(digests, questions, strict=True)
            if isinstance(digest, bytes) and isinstance(question, Question) and digest not in self._verdicts
        }
        results = self.servers.map(lambda question: tolerated(share, 1, self._verdict, question), [*new.values()])
        failed: dict[bytes, RewardError] = {}
        for digest, (verdict,) in zip(new, results, strict=True):
            if isinstance(verdict, RewardError):
                failed[digest] = verdict
            else:
                self._verdicts[digest] = verdict
        return [
            digest if isinstance(digest, RewardError) else failed.get(digest) or self._verdicts[digest]
            for digest in digests
        ]

    def _verdict(self, question: Question) -> list[str]:
        config = self._config
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        messages = [*system, {"role": "user", "content": question.text}]
        request = {"model": config.model, "messages": messages, "temperature": 0.0, "max_tokens": config.max_tokens}
        if question.schema is not None:
            wanted = {"name": "verdicts", "strict": True, "schema": question.schema}
            request["response_format"] = {"type": "json_schema", "json_schema": wanted}
        answer = self.servers.post(request)
        try:
            replied = answer.json()
            METER.judged(config.model, replied.get("usage") if isinstance(replied, dict) else None)
            reply = replied["choices"][0]["message"]["content"]
        except (TypeError, LookupError) as error:
            raise RewardError(f"{answer.server} answered {answer.shown!r}; expected a chat completion") from error
        if not isinstance(reply, str):
            raise RewardError(f"{answer.server} answered without text: {answer.shown!r}")
        try:
            return [question.read(reply)]
        except RewardError as error:
            of_row = f" (row {question.row})" if question.row else ""
            raise RewardError(f"{answer.server}{of_row}: {error}") from error


def quoted(reply: str) -> str:
    """Return the end of a reply in quotes, for errors."""
    return repr(reply if len(reply) <= _QUOTED else f"…{reply[-_QUOTED:]}")


@dataclass(frozen=True, slots=True)
class _Matching:
    """Makes questions whose replies have a verdict where the pattern matches, from a template."""

    pattern: regex.Pattern[str]
    template: TextTemplate

    @classmethod
    def of(cls, config: JudgeConfig, template: str) -> _Matching:
        return cls(regex.compile(config.pattern), TextTemplate(template))

    def question(self, share: float, row: Mapping[str, Any], **texts: str) -> Question | RewardError:
        """Return the question, or if failures are tolerated the error of the template."""
        (text,) = tolerated(share, 1, lambda: [self.template(row, **texts)])
        return text if isinstance(text, RewardError) else Question(text, self._read, str(row.get("id", "")))

    def _read(self, reply: str) -> str:
        pattern = self.pattern.pattern
        try:
            matches: list[str | None] = [
                match.group(1) for match in self.pattern.finditer(reply, timeout=_SEARCH_SECONDS)
            ]
        except TimeoutError as error:
            raise RewardError(
                f"the pattern {pattern!r} did not end within {_SEARCH_SECONDS:g} s in {quoted(reply)}"
            ) from error
        if not matches or (verdict := matches[-1]) is None:
            raise RewardError(f"the pattern {pattern!r} finds no verdict in {quoted(reply)}")
        return verdict.strip()


class JudgeOfCompletions:
    @classmethod
    def of(cls, config: JudgeReward, context: StageContext) -> JudgeOfCompletions:
        return cls(config)

    def __init__(self, config: JudgeReward) -> None:
        """Raises RewardError if an environment variable that the config names is not set or not valid."""
        self._config = config
        self._judge = Judge(config)
        self._matching = _Matching.of(config, config.template)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        share = self._config.tolerated_failures
        questions = [
            self._matching.question(share, row, prompt=prompt, completion=completion)
            for completion, prompt, row in zip(completions, prompts, rows, strict=True)
        ]
        values = [
            value for verdict in self._judge(questions, share) for value in tolerated(share, 1, self._value, verdict)
        ]
        result = checked_result(values, len(completions), self._judge.servers.name, share)
        metrics = {name: [value] * len(completions) for name, value in self._judge.servers.metrics().items()}
        return replace(result, extra={**result.extra, **metrics})

    def close(self) -> None:
        self._judge.servers.close()

    def _value(self, verdict: str | RewardError) -> list[dict[str, float]]:
        if isinstance(verdict, RewardError):
            raise verdict
        reward = self._number(verdict)
        if self._config.range is None:
            return [{"reward": reward}]
        low, high = self._config.range
        if not low <= reward <= high:
            raise RewardError(f"{self._judge.servers.name}: the verdict {verdict!r} is not from {low:g} to {high:g}")
        return [{"reward": reward, "score": (reward - low) / (high - low)}]

    def _number(self, verdict: str) -> float:
        name, values = self._judge.servers.name, self._config.verdicts
        if values:
            if verdict not in values:
                raise RewardError(f"{name}: the verdict {verdict!r} is none of {', '.join(values)}")
            return values[verdict]
        try:
            number = float(verdict)
        except ValueError as error:
            raise RewardError(f"{name}: the verdict {verdict!r} is not a number: give `verdicts`") from error
        if not math.isfinite(number):
            raise RewardError(f"{name}: the verdict {verdict!r} is not a finite number")
        return number


class JudgeOfPairs:
    def __init__(self, config: PairJudgeConfig) -> None:
        """Raises RewardError if an environment variable that the config names is not set or not valid."""
        self._config = config
        self.judge = Judge(config)
        self._matching = _Matching.of(config, config.template)

    def __call__(self, compared: Sequence[Comparison]) -> list[Outcome]:
        """Judge each pair as `outcomes` does; a pair without a verdict is "unjudged", and the caller enforces the
        tolerated share.
        """
        return ["unjudged" if isinstance(each, RewardError) else each for each in self.outcomes(compared)]

    def outcomes(self, compared: Sequence[Comparison]) -> list[Outcome | RewardError]:
        """Judge each pair in both orders; a verdict that changes with the order prefers neither.

        Raises RewardError for a pair without a verdict, or returns it if failures are tolerated.
        """
        share = self._config.tolerated_failures
        questions = [
            self._matching.question(share, pair.row, prompt=_prompt(pair), first=first["text"], second=second["text"])
            for pair in compared
            for first, second in ((pair.one, pair.other), (pair.other, pair.one))
        ]
        verdicts = self.judge(questions, share)
        sides = [side for verdict in verdicts for side in tolerated(share, 1, self._side, verdict)]
        return [_agreed(straight, turned) for straight, turned in zip(sides[::2], sides[1::2], strict=True)]

    def close(self) -> None:
        self.judge.servers.close()

    def _side(self, verdict: str | RewardError) -> list[str]:
        if isinstance(verdict, RewardError):
            raise verdict
        config = self._config
        sides = {config.first: "first", config.second: "second", config.tie: "tie"}
        if verdict not in sides:
            names = ", ".join(name for name in sides if name is not None)
            raise RewardError(f"{self.judge.servers.name}: the verdict {verdict!r} is none of {names}")
        return [sides[verdict]]


def _prompt(pair: Comparison) -> str:
    return str(pair.row["prompt"][-1]["content"])


def _agreed(straight: str | RewardError, turned: str | RewardError) -> Outcome | RewardError:
    for side in (straight, turned):
        if isinstance(side, RewardError):
            return side
    agreed: dict[tuple[object, object], Outcome] = {
        ("first", "second"): "one", ("second", "first"): "other", ("tie", "tie"): "ties"
    }  # fmt: skip
    return agreed.get((straight, turned), "order_dependent")
