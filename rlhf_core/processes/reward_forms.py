"""Reward functions of TRL, OpenRLHF and verl, called as those call them.

Sources: `GRPOTrainer._calculate_rewards` of TRL 1.16, `SingleTurnAgentExecutor` of OpenRLHF 0.11, `NaiveRewardManager`
of verl 0.9.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

from rlhf_core.errors import RecipeError, RewardError
from rlhf_core.processes.user_code import why_unfit

Row = Mapping[str, Any]

_FIELDS = ("reward", "score", "steps")  # of a value, so no names of metrics
_OPENRLHF_ARGUMENTS = ("queries", "prompts", "labels")
_VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL_ARGUMENTS = ("prompts", "completions", "log_extra", "log_metric")
_TRL_TRAINER = ("completion_ids", "trainer_state", "environments")  # of TRL's trainer, which there is not here
_TRL_DROPPED = ("prompt", "completion", "completion_ids")  # columns that TRL does not pass on


class Adapted(Protocol):
    """Returns a number, or {reward, score, metrics}, for each completion; the parent validates them."""

    async def __call__(self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Row]) -> Any: ...


def adapted(function: Callable[..., Any], form: str, options: Mapping[str, Any], name: str) -> Adapted:
    """Return a function of completions, prompts and rows that calls `function` in its form.

    Raises RecipeError if `function` does not take the arguments of its form.
    """
    return _FORMS[form](_User(function, options, name))


@dataclass(frozen=True, slots=True)
class _User:
    function: Callable[..., Any]
    options: Mapping[str, Any]
    name: str

    def require(self, framework: str, positional: Sequence[str] = (), named: Sequence[str] = ()) -> None:
        """Raise RecipeError unless the function takes these arguments and its options."""
        try:
            inspect.signature(self.function).bind(*positional, **dict.fromkeys(named), **self.options)
        except (TypeError, ValueError) as error:
            others = f" and its options {sorted(self.options)}" if self.options else ""
            raise RecipeError(
                f"{self.name} must take ({', '.join((*positional, *named))}){others}, as {framework} calls it: "
                f"{why_unfit(error)}"
            ) from error

    async def __call__(self, *arguments: Any, **named: Any) -> Any:
        returned = self.function(*arguments, **named, **self.options)
        return await returned if inspect.isawaitable(returned) else returned


class _OpenRLHF:
    """`reward_func(queries, prompts, labels)`, by position, with lists of one: the query is the prompt followed by the
    completion, the label the row's `answer`. It returns a number, or {rewards, scores, extra_logs}.
    """

    def __init__(self, user: _User) -> None:
        user.require("OpenRLHF", positional=_OPENRLHF_ARGUMENTS)
        self._user = user

    async def __call__(self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Row]) -> Any:
        return await asyncio.gather(*map(self._value, completions, prompts, rows))

    async def _value(self, completion: str, prompt: str, row: Row) -> dict[str, Any]:
        returned = await self._user([prompt + completion], [prompt], [row.get("answer", "")])
        fields = returned if isinstance(returned, Mapping) else {"rewards": returned}
        _require_key("rewards", fields, self._user.name)
        extra = {
            **{name: fields[name] for name in fields if name not in ("rewards", "scores", "extra_logs")},
            **(fields.get("extra_logs") or {}),
        }
        value = {"reward": _single(fields["rewards"]), **_metrics(extra, self._user.name)}
        score = _single(fields.get("scores"))
        return value if score is None else value | {"score": score}


class _Verl:
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`, by name, with one completion: of the row's
    `data_source`, its `reward_model.ground_truth` or else `answer`, and its `extra_info`. It returns a number, or
    {score, acc, …}, whose `acc` is a score from 0 to 1.
    """

    def __init__(self, user: _User) -> None:
        user.require("verl", named=_VERL_ARGUMENTS)
        self._user = user

    async def __call__(self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Row]) -> Any:
        return await asyncio.gather(*map(self._value, completions, rows))

    async def _value(self, completion: str, row: Row) -> Any:
        name = self._user.name
        if "data_source" not in row:
            raise RewardError(f"{name} needs the column `data_source`; the rows have {sorted(row)}")
        returned = await self._user(
            data_source=row["data_source"],
            solution_str=completion,
            ground_truth=_ground_truth(row, name),
            # verl adds these two; a rollout gives no scores of its own here.
            extra_info={**(row.get("extra_info") or {}), "num_turns": None, "rollout_reward_scores": {}},
        )
        if not isinstance(returned, Mapping):
            return _single(returned)
        _require_key("score", returned, name)
        others = {key: item for key, item in returned.items() if key not in ("score", "acc")}
        value = {"reward": _single(returned["score"]), **_metrics(others, name)}
        return value | {"score": _single(returned["acc"])} if "acc" in returned else value


def _ground_truth(row: Row, name: str) -> Any:
    judged = row.get("reward_model")
    if isinstance(judged, Mapping) and "ground_truth" in judged:
        return judged["ground_truth"]
    if "answer" in row:
        return row["answer"]
    raise RewardError(
        f"{name} needs a ground truth: give the rows `reward_model.ground_truth`, or `answer`; they have {sorted(row)}"
    )


class _TRL:
    """`f(prompts, completions, log_extra, log_metric, **columns)`, by name, with a batch; a function without `**` gets
    those that it names. It returns a number for each completion, or None for one that it does not apply to.
    """

    conversational = False

    def __init__(self, user: _User) -> None:
        try:
            parameters = inspect.signature(user.function).parameters.values()
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{user.name} has no readable signature, as TRL needs: {why_unfit(error)}") from error
        self._user = user
        self._takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters)
        self._names = {each.name for each in parameters}
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        needed = {each.name for each in parameters if each.default is each.empty and each.kind not in variable}
        self._needed = needed - user.options.keys()
        if of_trainer := [name for name in _TRL_TRAINER if name in self._needed]:
            raise RecipeError(f"{user.name} needs TRL's `{of_trainer[0]}`, which there is not here: give it a default")
        user.require("TRL", named=sorted({*filter(self._takes, _TRL_ARGUMENTS), *self._needed}))

    async def __call__(self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Row]) -> Any:
        name, logged = self._user.name, _Logged(self._user.name, len(completions))
        passed = {
            "prompts": [row["prompt"] for row in rows] if self.conversational else list(prompts),
            "completions": [self._completion(text) for text in completions],
            "log_extra": logged.extra,
            "log_metric": logged.metric,
        }
        # A row without one of the columns has None there, as in a data set of `datasets`.
        names = dict.fromkeys(column for row in rows for column in row if column not in _TRL_DROPPED)
        if taken := [column for column in names if column in passed or column in self._user.options]:
            raise RewardError(f"{name} gets `{taken[0]}` beside the rows: rename their column of this name")
        columns = {column: [row.get(column) for row in rows] for column in names}
        if lacking := sorted(self._needed - passed.keys() - columns.keys()):
            raise RewardError(f"{name} needs the column `{lacking[0]}`; the rows have {sorted(columns)}")
        arguments = {key: item for key, item in {**passed, **columns}.items() if self._takes(key)}
        return logged.added_to(await self._user(**arguments))

    def _takes(self, name: str) -> bool:
        return self._takes_all or name in self._names

    def _completion(self, text: str) -> Any:
        return [{"role": "assistant", "content": text}] if self.conversational else text


class _ConversationalTRL(_TRL):
    """The same with a list of messages for each prompt and completion."""

    conversational = True


_FORMS: Mapping[str, Callable[[_User], Adapted]] = {
    "openrlhf": _OpenRLHF,
    "trl": _TRL,
    "trl_conversational": _ConversationalTRL,
    "verl": _Verl,
}


@dataclass(frozen=True, slots=True)
class _Logged:
    """Metrics that a function of TRL logs during a call."""

    name: str
    count: int  # completions
    _columns: dict[str, list[Any]] = field(default_factory=dict)
    _metrics: dict[str, list[float]] = field(default_factory=dict)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        listed = _listed(values)
        if len(listed) != self.count:
            raise RewardError(f"{self.name} logs {len(listed)} values of `{column}` for {self.count} completions")
        self._columns[column] = listed

    def metric(self, name: str, value: Any) -> None:
        self._metrics.setdefault(name, []).append(_single(value))

    def added_to(self, returned: Any) -> Any:
        """Return the returned values, each with its metrics."""
        shared = {name: fmean(values) for name, values in self._metrics.items()}
        if not shared and not self._columns:
            return returned
        values = _listed(returned)
        if len(values) != self.count:
            return values  # which the parent refuses
        each = [{**shared, **{name: items[i] for name, items in self._columns.items()}} for i in range(self.count)]
        return [
            {"reward": _single(value), **_metrics(metrics, self.name)}
            for value, metrics in zip(values, each, strict=True)
        ]


def _require_key(key: str, returned: Mapping[str, Any], name: str) -> None:
    if key not in returned:
        raise RewardError(f"{name}: there is no `{key}` in {sorted(map(str, returned))}")


def _metrics(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the numbers of `values`, which are metrics; others are printed to the log."""
    metrics = {}
    for key, value in values.items():
        single = _single(value)
        if key in _FIELDS or not isinstance(single, numbers.Real):
            print(f"{name}: {key} = {single!r}, which is no metric", flush=True)
        else:
            metrics[key] = single
    return metrics


def _single(value: Any) -> Any:
    """Return the only item of a list, an array or a tensor; other values as they are."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return _single(value[0]) if isinstance(value, list | tuple) and len(value) == 1 else value


def _listed(values: Any) -> list[Any]:
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    return listed if isinstance(listed, list) else [listed]
