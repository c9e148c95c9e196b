"""reasoning-gym: generated tasks with verifiable answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.data.sources import ReasoningGymSource
from rlhf_core.contract import StageContext
from rlhf_core.data.formats import Row, format_of
from rlhf_core.data.formats.base import Generated
from rlhf_core.data.sources.base import BadRow, Located, RowSource
from rlhf_core.errors import RecipeError, did_you_mean, reason_of

# Their scorers compare tuples, which JSON gives back as lists.
_TUPLE_TASKS = frozenset({"arc_agi", "rearc"})
_SET_BY_US = frozenset({"seed", "size"})
_FIRST_ROWS, _FIRST_SECONDS = 20, 0.2  # of each task, before a run


class ReasoningGym(RowSource[ReasoningGymSource]):
    def rows(self, context: StageContext, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        for task, options in self.config.tasks.items():
            rows = generate(task, options, size=self.config.size, seed=self.config.seed, data_format=data_format)
            yield from ((f"{task} {index}", row) for index, row in enumerate(rows))

    def first_rows(self, root: Path, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        size = min(self.config.size, _FIRST_ROWS)
        for task, options in self.config.tasks.items():
            check_task(task, options)
        for task, options in self.config.tasks.items():
            until = time.monotonic() + _FIRST_SECONDS
            rows = generate(task, options, size=size, seed=self.config.seed, data_format=data_format)
            for index, row in enumerate(rows):
                yield f"{task} item {index}", row
                if time.monotonic() > until:
                    break


def generate(task: str, options: Mapping[str, Any], *, size: int, seed: int, data_format: str) -> Iterator[Row]:
    """Yield `size` rows of `task` in the columns of `data_format`; row i is generated with seed + i.

    Raises RecipeError for an unknown task or option, for options that generate no item, and for a format without such
    rows; RowError where it needs an answer and there is no single one.
    """
    dataset = _create(task, options, size=size, seed=seed)
    for index in range(size):
        try:
            item = dataset[index]
        except Exception as error:  # a generator may raise anything
            raise RecipeError(
                f"reasoning_gym task `{task}` makes no item {index} of its options: {reason_of(error)}"
            ) from error
        yield format_of(data_format).generated(
            Generated(task, item["question"], item["answer"], json_safe(item["metadata"]))
        )


def check_task(task: str, options: Mapping[str, Any]) -> None:
    """Raise RecipeError if there is no such task, it has no such option, or it rejects an option's value."""
    _create(task, options, size=1, seed=0)


def score(task: str, answer: str | None, row: Mapping[str, Any]) -> float:
    """Return the score (0 to 1) of `answer` by the task's own scorer; `row` is a canonical row of format prompts."""
    metadata = row["metadata"]
    entry = {
        "question": row["prompt"][-1]["content"],
        "answer": row.get("answer"),
        "metadata": _tuples(metadata) if task in _TUPLE_TASKS else metadata,
    }
    return float(_scorer(task)(answer, entry))


def json_safe(value: Any) -> Any:
    """Return `value` in JSON types: tuples and sets as lists, numpy numbers as numbers, other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((json_safe(item) for item in value), key=str)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if hasattr(value, "tolist"):  # numpy
        return json_safe(value.tolist())
    return str(value)


@lru_cache(maxsize=256)
def _scorer(task: str) -> Any:
    import reasoning_gym

    _check_name(task)
    return reasoning_gym.get_score_answer_fn(task)


def _create(task: str, options: Mapping[str, Any], *, size: int, seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    _check_name(task)
    valid_options = sorted({field.name for field in fields(DATASETS[task][1])} - _SET_BY_US)
    for option in options:
        if option in _SET_BY_US:
            raise RecipeError(f"reasoning_gym task `{task}`: `{option}` belongs to the source, not to a task")
        if option not in valid_options:
            raise RecipeError(f"reasoning_gym task `{task}` has no option `{option}`{_hint(option, valid_options)}")
        _check_type(task, option, options[option])
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
    except Exception as error:  # what checks the options may raise anything
        raise RecipeError(f"reasoning_gym task `{task}` refuses its options: {reason_of(error)}") from error


def _check_type(task: str, option: str, value: Any) -> None:
    """Raise RecipeError for a value of another type than the task declares: many check it only when generating
    items.
    """
    from reasoning_gym.factory import DATASETS

    config = DATASETS[task][1]
    declared = TypeAdapter(get_type_hints(config)[option])
    default = getattr(config(), option)
    if _fits(declared, value) or not _fits(declared, default):  # some declare what their own default is not
        return
    raise RecipeError(
        f"reasoning_gym task `{task}`: `{option}` is {json.dumps(value, ensure_ascii=False)}, which is of another type "
        f"than its default, {json.dumps(json_safe(default), ensure_ascii=False)}"
    )


def _fits(declared: TypeAdapter[Any], value: Any) -> bool:
    try:
        declared.validate_json(json.dumps(json_safe(value)), strict=True)  # as JSON: a list may represent a tuple
    except ValidationError:
        return False
    return True


def _check_name(task: str) -> None:
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise RecipeError(f"reasoning_gym has no task `{task}`{_hint(task, sorted(DATASETS))}")


def _hint(wrong: str, valid: list[str]) -> str:
    return did_you_mean(wrong, valid) or f"; there are {', '.join(valid)}"


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
