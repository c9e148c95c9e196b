"""Rewards by a rubric: a judge says of every criterion whether a completion meets it, all in one reply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core.config.rewards.rewards import GroupRubricReward, Rubric, RubricReward
from rlhf_core.config.rewards.rubrics import Criterion
from rlhf_core.contract import StageContext
from rlhf_core.errors import RewardError
from rlhf_core.rewards.base import RewardResult, TextGroup, checked_result, tolerated
from rlhf_core.rewards.criteria import criteria_of_row, read_rubric, require_weight, total
from rlhf_core.rewards.judge import Judge, Question, quoted
from rlhf_core.rewards.templates import TextTemplate
from rlhf_core.system.json_text import JSONTextError, parse_json

TEMPLATE = """\
{% for message in messages %}[{{ message.role }}]
{{ message.content }}

{% endfor %}The last turn was answered as follows.

{{ answers }}

Judge each answer by every criterion alone:

{{ criteria }}

Reply with JSON: for each answer and each criterion first a short `reason`, then whether it is `met`.
"""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The verdict of each criterion on a completion."""

    criteria: tuple[Criterion, ...]
    met: tuple[bool, ...]


class RubricJudge:
    def __init__(self, config: Rubric, context: StageContext, tolerated_failures: float) -> None:
        """Raises RewardError if the rubric's file has no valid criteria, or an environment variable is not set."""
        self._config = config
        self._share = tolerated_failures
        self.shared: tuple[Criterion, ...] = ()  # criteria of every row
        if config.path is not None:
            try:
                self.shared = read_rubric(context.user_file(config.path))
            except RewardError as error:
                raise RewardError(f"{config.path}: {error}") from error
        self._judge = Judge(config)
        self._template = TextTemplate(config.template or TEMPLATE)

    @property
    def name(self) -> str:
        return self._judge.servers.name

    def __call__(self, groups: Sequence[TextGroup]) -> list[Verdicts | RewardError]:
        """Return the verdicts on the completions of all groups, one after the other. Each group is one call.

        If failures are tolerated, an error takes the place of the verdicts of its group, else it is raised.
        """
        criteria = [each for group in groups for each in tolerated(self._share, 1, self._criteria, group)]
        questions = [
            each
            for group, of_group in zip(groups, criteria, strict=True)
            for each in tolerated(self._share, 1, self._question, group, of_group)
        ]
        return [
            each
            for group, of_group, verdict in zip(groups, criteria, self._judge(questions, self._share), strict=True)
            for each in _verdicts(verdict, of_group, len(group.completions))
        ]

    def rewards(self, groups: Sequence[TextGroup]) -> RewardResult:
        values = [each if isinstance(each, RewardError) else self._value(each) for each in self(groups)]
        result = checked_result(values, len(values), self.name, self._share)
        metrics = {name: [value] * len(values) for name, value in self._judge.servers.metrics().items()}
        return replace(result, extra={**result.extra, **metrics})

    def close(self) -> None:
        self._judge.servers.close()

    def _value(self, verdicts: Verdicts) -> dict[str, float]:
        criteria, met = verdicts.criteria, verdicts.met
        missed = any(each.required and not is_met for each, is_met in zip(criteria, met, strict=True))
        shared = zip(self.shared, met[: len(self.shared)], strict=True)
        reward = total(criteria, met)
        return {
            "reward": reward, "score": reward, "met": sum(met) / len(met), "required_missed": float(missed),
            **{each.name: float(is_met) for each, is_met in shared},
        }  # fmt: skip

    def _criteria(self, group: TextGroup) -> list[tuple[Criterion, ...]]:
        column = self._config.column
        criteria = self.shared + (() if column is None else criteria_of_row(group.row, column))
        try:
            require_weight(criteria)
        except RewardError as error:
            raise RewardError(f"row {group.row.get('id')}: {error}") from error
        return [criteria]

    def _question(self, group: TextGroup, criteria: tuple[Criterion, ...] | RewardError) -> list[Question]:
        if isinstance(criteria, RewardError):
            raise criteria
        answers, count = len(group.completions), len(criteria)
        text = self._template(
            group.row, prompt=group.prompt, answers=_written_answers(group.completions), criteria=written(criteria)
        )

        def read(reply: str) -> str:
            return "".join("01"[met] for met in _read(reply, answers, count))

        return [Question(text, read, str(group.row.get("id", "")), _schema(answers, count))]


class RubricOfCompletions:
    @classmethod
    def of(cls, config: RubricReward, context: StageContext) -> RubricOfCompletions:
        return cls(RubricJudge(config, context, config.tolerated_failures))

    def __init__(self, judge: RubricJudge) -> None:
        self._judge = judge

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        texts = zip(completions, prompts, rows, strict=True)
        return self._judge.rewards([TextGroup([completion], prompt, row) for completion, prompt, row in texts])

    def close(self) -> None:
        self._judge.close()


class RubricOfGroups:
    @classmethod
    def of(cls, config: GroupRubricReward, context: StageContext) -> RubricOfGroups:
        return cls(RubricJudge(config, context, config.tolerated_failures))

    def __init__(self, judge: RubricJudge) -> None:
        self._judge = judge

    def __call__(self, groups: Sequence[TextGroup]) -> RewardResult:
        result = self._judge.rewards(groups)
        return replace(result, scores=[None] * len(result.scores))  # filtering reads scores of single completions

    def close(self) -> None:
        self._judge.close()


def written(criteria: Sequence[Criterion]) -> str:
    names = _criteria(len(criteria))
    return "\n".join(f"[{name}] {each.description}" for name, each in zip(names, criteria, strict=True))


def _written_answers(completions: Sequence[str]) -> str:
    names = _answers(len(completions))
    return "\n\n".join(f"[{name}]\n{text}" for name, text in zip(names, completions, strict=True))


def _answers(count: int) -> list[str]:
    return [f"answer_{number}" for number in range(1, count + 1)]


def _criteria(count: int) -> list[str]:
    return [f"criterion_{number}" for number in range(1, count + 1)]


def _schema(answers: int, criteria: int) -> dict[str, Any]:
    """Return the JSON schema of a reply. All keys are required, as strict structured output demands."""
    verdict = _object({"reason": {"type": "string"}, "met": {"type": "boolean"}})
    of_answer = _object(dict.fromkeys(_criteria(criteria), verdict))
    return _object(dict.fromkeys(_answers(answers), of_answer))


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _read(reply: str, answers: int, criteria: int) -> Iterator[bool]:
    """Yield whether each answer meets each criterion. Raises RewardError for anything but the schema's JSON."""
    try:
        value = parse_json(reply)
    except JSONTextError as error:
        raise RewardError(f"the reply is not the JSON that was asked for ({error}): {quoted(reply)}") from error
    for answer, of_answer in _keyed(value, "the reply", _answers(answers)).items():
        for criterion, verdict in _keyed(of_answer, f"`{answer}`", _criteria(criteria)).items():
            met = verdict.get("met") if isinstance(verdict, dict) else None
            if not isinstance(met, bool):
                raise RewardError(f"`{answer}.{criterion}.met` is {met!r}, expected true or false")
            yield met


def _keyed(value: Any, where: str, names: Sequence[str]) -> dict[str, Any]:
    """Return `value` in the order of `names`, its keys. Raises RewardError if these are others."""
    keys = value.keys() if isinstance(value, dict) else set()
    if keys != {*names}:
        missing = next((name for name in names if name not in keys), None)
        problem = f"lacks `{missing}`" if missing is not None else f"has `{min(map(str, keys - {*names}))}`"
        raise RewardError(f"{where} {problem}; expected {names[0]} to {names[-1]}")
    return {name: value[name] for name in names}


def _verdicts(
    verdict: str | RewardError, criteria: tuple[Criterion, ...] | RewardError, answers: int
) -> list[Verdicts | RewardError]:
    if isinstance(verdict, RewardError) or isinstance(criteria, RewardError):
        failure = verdict if isinstance(verdict, RewardError) else criteria
        assert isinstance(failure, RewardError)
        return [failure for _ in range(answers)]
    size = len(criteria)
    parts = [verdict[start : start + size] for start in range(0, len(verdict), size)]
    return [Verdicts(criteria, tuple(flag == "1" for flag in part)) for part in parts]
