"""Rewards compared on known answers: a row's own answer must be worth more than that of another row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlhf_core.config.rewards.rewards import ANSWER_PLACE, RewardConfig, TextReward, VerifierReward
from rlhf_core.config.texts import is_blank
from rlhf_core.errors import RewardError, StageError, one_line, shortened
from rlhf_core.rewards.base import Reward, TrajectoryReward
from rlhf_core.rewards.text import RewardOfText
from rlhf_core.rewards.verifier import Verifier

_ROWS = 4  # that are compared
# In which completions give an answer, where `check` is not set.
_FORMS = (
    "{answer}", "Answer: {answer}", "answer: {answer}", "The answer is {answer}", "#### {answer}", "\\boxed{{answer}}",
    "<answer>{answer}</answer>",
)  # fmt: skip
_SHOWN = 80  # characters of a completion


@dataclass(frozen=True, slots=True)
class Asked:
    """A row of a dataset: its place in words, the text of its prompt, and its columns."""

    place: str
    prompt: str
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """At most one is not empty; none is: a right answer was worth more than a wrong one."""

    problem: str = ""  # of a reward that is to be refused
    unknown: str = ""  # why it could not be compared


@dataclass(frozen=True, slots=True)
class _Pair:
    asked: Asked
    right: str
    wrong: str


def compared(config: TextReward, reward: Reward, rows: Sequence[Asked]) -> Comparison:
    """Compare the rewards of right and wrong answers to some of `rows`."""
    if config.check is False:
        return Comparison(unknown="`check` is false")
    if config.check is None and isinstance(config, VerifierReward) and not config.verifier.reads_answer:
        columns = ", ".join(f"`{column}`" for column in config.row_columns)
        return Comparison(
            unknown=f"it reads {columns}, not `answer`: set `check` to a completion that it takes for right"
        )
    forms = _FORMS if config.check is None else (config.check,)
    try:
        pairs = list(_pairs(_asked_for(rows), forms, reward if config.check is None else None))
        if not pairs:
            return Comparison(unknown=_why_none(rows))
        texts = [text for pair in pairs for text in (pair.right, pair.wrong)]
        asked = [pair.asked for pair in pairs for _ in range(2)]
        values = reward(texts, [each.prompt for each in asked], [each.row for each in asked]).totals()
    except RewardError as error:
        reason, *_ = str(error).split("\n")  # without its traceback
        return Comparison(unknown=f"it failed for such an answer: {one_line(reason)}")
    sign = -1 if config.weight < 0 else 1
    rights, wrongs = values[::2], values[1::2]
    if any(sign * (right - wrong) > 0 for right, wrong in zip(rights, wrongs, strict=True)):
        return Comparison()
    first = pairs[0]
    sentence = (
        f"gives {rights[0]:g} for the right answer of {first.asked.place}, {_quoted(first.right)}, and {wrongs[0]:g} "
        f"for a wrong one, {_quoted(first.wrong)}, and tells none of {len(pairs)} such pairs apart"
    )
    if config.check is None and not isinstance(config, VerifierReward):
        return Comparison(unknown=f"it {sentence}: set `check` to a completion that it takes for right")
    return Comparison(
        f"{sentence}: correct it, or the rows' `answer`; or set `check` to a completion that it takes for right, with "
        f"{ANSWER_PLACE}, or to false"
    )


def require_known_answers(
    rewards: Mapping[str, RewardConfig], built: Mapping[str, TrajectoryReward], rows: Sequence[Asked], section: str
) -> None:
    """Raise StageError if a verifier, or a reward with a setting `check`, takes a wrong answer for right.

    built: the rewards, by the names in `rewards`. section: of the settings that have them.
    """
    for name, config in rewards.items():
        reward = built[name]
        if isinstance(reward, RewardOfText) and isinstance(config, TextReward) and _is_checked_in_job(config):
            comparison = compared(config, reward.reward, rows)
            if comparison.problem:
                raise StageError(f"{section}.{name} {comparison.problem}")
            if comparison.unknown:
                print(f"note: {section}.{name} was not checked with known answers: {comparison.unknown}", flush=True)


def _is_checked_in_job(config: TextReward) -> bool:
    return bool(config.check) or (isinstance(config, VerifierReward) and config.check is None)


def _asked_for(rows: Sequence[Asked]) -> list[tuple[Asked, str, str]]:
    """Return some rows with their answer, and that of another row."""
    answered = [(each, str(each.row["answer"])) for each in rows if not is_blank(str(each.row.get("answer") or ""))]
    known = []
    for asked, right in answered:
        others = (
            answer
            for other, answer in answered
            if other.row.get("task") == asked.row.get("task") and _same(answer) != _same(right)
        )
        if (wrong := next(others, None)) is not None:
            known.append((asked, right, wrong))
        if len(known) == _ROWS:
            break
    return known


def _pairs(known: Sequence[tuple[Asked, str, str]], forms: Sequence[str], reward: Reward | None) -> Iterator[_Pair]:
    """Yield the completions of each row and form. reward: a verifier of it leaves out forms that have no answer."""
    for (asked, right, wrong), form in product(known, forms):
        texts = [form.replace(ANSWER_PLACE, answer) for answer in (right, wrong)]
        if not isinstance(reward, Verifier) or reward.finds_an_answer(texts[0]):
            yield _Pair(asked, *texts)


def _why_none(rows: Sequence[Asked]) -> str:
    if not any(each.row.get("answer") for each in rows):
        return "its rows have no `answer`"
    if not _asked_for(rows):
        return "no two of the rows looked at have different answers"
    return f"its pattern finds no answer in what was tried: set `check` to a completion, with {ANSWER_PLACE}"


def _same(answer: str) -> str:
    return " ".join(answer.split()).casefold()


def _quoted(text: str) -> str:
    return repr(shortened(one_line(text), _SHOWN))
