"""Verdicts of a model behind an OpenAI-compatible endpoint: on single completions, as a reward, and on pairs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import regex

from rlhf_core.config.rewards.judges import JudgeConfig, PairJudgeConfig
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


class Judge:
    """Requests verdicts, several at a time, once per text: verdicts are cached in this process by the SHA-256 of the
    text for the lifetime of the judge (all steps of a stage), at some 200 bytes each.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self.servers = Servers("judge", config, "/chat/completions")
        self._pattern = regex.compile(config.pattern)
        self._verdicts: dict[bytes, str] = {}

    def __call__(self, texts: Sequence[str | RewardError], share: float) -> list[str | RewardError]:
        """Return the verdict on each text.

        share: tolerated share of failures; if it is above 0, an error takes the place of its verdict, else it is
        raised. An error among the texts is such a failure.
        """
        digests = {text: hashlib.sha256(text.encode()).digest() for text in texts if isinstance(text, str)}
        new = [text for text, digest in digests.items() if digest not in self._verdicts]
        results = self.servers.map(lambda text: tolerated(share, 1, self._verdict, text), new)
        failed: dict[str, RewardError] = {}
        for text, (verdict,) in zip(new, results, strict=True):
            if isinstance(verdict, RewardError):
                failed[text] = verdict
            else:
                self._verdicts[digests[text]] = verdict
        return [
            text if isinstance(text, RewardError) else failed.get(text) or self._verdicts[digests[text]]
            for text in texts
        ]

    def _verdict(self, text: str) -> list[str]:
        config = self._config
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        messages = [*system, {"role": "user", "content": text}]
        answer = self.servers.post(
            {"model": config.model, "messages": messages, "temperature": 0.0, "max_tokens": config.max_tokens}
        )
        try:
            replied = answer.json()
            METER.judged(config.model, replied.get("usage") if isinstance(replied, dict) else None)
            reply = replied["choices"][0]["message"]["content"]
        except (TypeError, LookupError) as error:
            raise RewardError(f"{answer.server} answered {answer.shown!r}; expected a chat completion") from error
        if not isinstance(reply, str):
            raise RewardError(f"{answer.server} answered without text: {answer.shown!r}")
        shown = repr(reply if len(reply) <= _QUOTED else f"…{reply[-_QUOTED:]}")
        try:
            matches = [match.group(1) for match in self._pattern.finditer(reply, timeout=_SEARCH_SECONDS)]
        except TimeoutError as error:
            raise RewardError(
                f"{answer.server}: the pattern {config.pattern!r} did not end within {_SEARCH_SECONDS:g} s in {shown}"
            ) from error
        if not matches or matches[-1] is None:
            raise RewardError(f"{answer.server}: the pattern {config.pattern!r} finds no verdict in {shown}")
        return [matches[-1].strip()]


class JudgeOfCompletions:
    @classmethod
    def of(cls, config: JudgeReward, context: StageContext) -> JudgeOfCompletions:
        return cls(config)

    def __init__(self, config: JudgeReward) -> None:
        """Raises RewardError if an environment variable that the config names is not set or not valid."""
        self._config = config
        self._judge = Judge(config)
        self._template = TextTemplate(config.template)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        share = self._config.tolerated_failures
        texts = [
            _written(share, self._template, row, prompt=prompt, completion=completion)
            for completion, prompt, row in zip(completions, prompts, rows, strict=True)
        ]
        values = [value for verdict in self._judge(texts, share) for value in tolerated(share, 1, self._value, verdict)]
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
            raise RewardError(f"{name}: the verdict {verdict!r} is no number: give `verdicts`") from error
        if not math.isfinite(number):
            raise RewardError(f"{name}: the verdict {verdict!r} is no finite number")
        return number


class JudgeOfPairs:
    def __init__(self, config: PairJudgeConfig) -> None:
        """Raises RewardError if an environment variable that the config names is not set or not valid."""
        self._config = config
        self._judge = Judge(config)
        self._template = TextTemplate(config.template)

    def __call__(self, compared: Sequence[Comparison]) -> list[Outcome]:
        """Judge each pair in both orders; a verdict that changes with the order prefers neither.

        Raises RewardError for a pair without a verdict, or returns "unjudged" if failures are tolerated; the caller
        enforces their share.
        """
        share = self._config.tolerated_failures
        texts = [
            _written(share, self._template, pair.row, prompt=_prompt(pair), first=first["text"], second=second["text"])
            for pair in compared
            for first, second in ((pair.one, pair.other), (pair.other, pair.one))
        ]
        sides = [self._side(verdict) for verdict in self._judge(texts, share)]
        return [_agreed(straight, turned) for straight, turned in zip(sides[::2], sides[1::2], strict=True)]

    def close(self) -> None:
        self._judge.servers.close()

    def _side(self, verdict: str | RewardError) -> str:
        config = self._config
        sides = {config.first: "first", config.second: "second", config.tie: "tie"}
        if isinstance(verdict, str) and verdict in sides:
            return sides[verdict]
        if not config.tolerated_failures:
            if isinstance(verdict, RewardError):
                raise verdict
            names = ", ".join(name for name in sides if name is not None)
            raise RewardError(f"{self._judge.servers.name}: the verdict {verdict!r} is none of {names}")
        return "unjudged"


def _prompt(pair: Comparison) -> str:
    return str(pair.row["prompt"][-1]["content"])


def _agreed(straight: str, turned: str) -> Outcome:
    if "unjudged" in (straight, turned):
        return "unjudged"
    agreed: dict[tuple[str, str], Outcome] = {
        ("first", "second"): "one", ("second", "first"): "other", ("tie", "tie"): "ties"
    }  # fmt: skip
    return agreed.get((straight, turned), "order_dependent")


def _written(share: float, template: TextTemplate, row: Mapping[str, Any], **texts: str) -> str | RewardError:
    (text,) = tolerated(share, 1, lambda: [template(row, **texts)])
    return text  # type: ignore[no-any-return]
