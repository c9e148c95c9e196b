"""Runs tasks in the process of lm-evaluation-harness, and sends a row of each question to the parent."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.chat.special_tokens import unmarked
from rlhf_core.errors import StageError, did_you_mean, reason_of
from rlhf_core.evaluation.harness.language_model import Answer, EngineModel

_RESAMPLES = 1000  # of the harness's own standard errors, where a metric is no mean of rows
_ROWS = 500  # sent at a time

Exchange = Callable[[Mapping[str, Any]], Any]  # sends a message to the parent, and returns its answer


def run_tasks(settings: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
    """Evaluate the tasks, and send their rows. Returns the harness's aggregates, by task and group.

    settings: those of BenchmarkConfig with `folder`, of the tasks, `model`, the model's folder, and `seed`.
    """
    loaded = _loaded(settings)
    tasks: dict[str, Task] = loaded["tasks"]
    _check(tasks, settings)
    _seed(settings["seed"])
    for name, task in tasks.items():
        _set_shots(name, task, settings["num_fewshot"])
        task.set_fewshot_seed(seed=settings["seed"])
    model = EngineModel(
        load_tokenizer(Path(settings["model"])), _asking(exchange, settings["requests_per_call"]), settings
    )
    chat = settings["apply_chat_template"]
    results: dict[str, Any] = evaluate(
        lm=model, task_dict=loaded, limit=settings["limit"], bootstrap_iters=_RESAMPLES, log_samples=True,
        apply_chat_template=chat, fewshot_as_multiturn=chat, confirm_run_unsafe_code=settings["unsafe_code"],
    )  # fmt: skip
    rows = list(_rows(results["samples"], model))
    for start in range(0, len(rows), _ROWS):
        exchange({"rows": rows[start : start + _ROWS]})
    return {
        "tasks": {name: _plain(results["results"][name]) for name in tasks},
        "groups": _plain(results.get("groups", {})),
        "higher_is_better": {name: _plain(task.higher_is_better()) for name, task in tasks.items()},
        "num_fewshot": {name: task.get_config("num_fewshot") for name, task in tasks.items()},
        "truncated": model.truncated,
    }


def _loaded(settings: Mapping[str, Any]) -> Any:
    """Return the harness's tasks and groups. Its own are only read where they are asked for: they are thousands."""
    names, folder = settings["tasks"], settings["folder"]
    manager = TaskManager(include_path=folder, include_defaults=False)
    if set(names) - set(manager.all_tasks):
        manager = TaskManager(include_path=folder, include_defaults=True)
    for name in names:
        if name not in manager.all_tasks:
            raise StageError(
                f"tasks: there is no task, group or tag `{name}`{did_you_mean(name, manager.all_tasks)} in the task "
                "folder or in lm-evaluation-harness"
            )
    try:
        return manager.load(list(names))
    except (OSError, ValueError) as error:  # of data that cannot be loaded, here or from the hub
        raise StageError(f"tasks: {', '.join(names)} cannot be loaded: {reason_of(error)}") from error


def _check(tasks: Mapping[str, Task], settings: Mapping[str, Any]) -> None:
    """Raise StageError for a task that this stage must not or cannot run."""
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) and not settings["unsafe_code"]:
            raise StageError(
                f"{name} is marked `unsafe_code`: it runs completions as programs on this machine, outside of the "
                "sandbox: set unsafe_code to true if these may"
            )
        if getattr(task, "MULTIMODAL", False):
            raise StageError(f"{name} shows images or sound, which benchmarks do not: remove it")


def _seed(seed: int) -> None:
    """Seed the generators that tasks may draw from; few-shot examples have their own."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _set_shots(name: str, task: Task, shots: int | None) -> None:
    own = task.get_config("num_fewshot")
    if shots is not None and shots and own == 0:
        raise StageError(f"num_fewshot={shots}, but {name} always runs zero-shot: remove num_fewshot, or the task")
    task.set_config(key="num_fewshot", value=(own or 0) if shots is None else shots)


def _asking(exchange: Exchange, at_a_time: int) -> Callable[[str, list[dict[str, Any]]], list[Any]]:
    """Return a function that asks for the answers to requests, `at_a_time` of them in a message."""

    def ask(what: str, items: list[dict[str, Any]]) -> list[Any]:
        answers: list[Any] = []
        for first in range(0, len(items), at_a_time):
            part = items[first : first + at_a_time]
            answers += exchange({"ask": what, "first": first, "total": len(items), "items": part})
        return answers

    return ask


def _rows(samples: Mapping[str, Sequence[Mapping[str, Any]]], model: EngineModel) -> Iterator[dict[str, Any]]:
    """Yield a row of each question of each task, with the values of all filters."""
    for task, of_task in samples.items():
        rows: dict[int, dict[str, Any]] = {}
        for sample in of_task:
            if sample["doc_id"] not in rows:
                rows[sample["doc_id"]] = _row(task, sample, model)
            values = rows[sample["doc_id"]]["values"]
            for metric in sample["metrics"]:
                values[score_name(metric, sample["filter"])] = _number(sample[metric])
        yield from rows.values()


def score_name(metric: str, filtered: str) -> str:
    return metric if filtered == "none" else f"{metric}.{filtered}"


def _row(task: str, sample: Mapping[str, Any], model: EngineModel) -> dict[str, Any]:
    """Return a row with the answer of the model: its completion, or the most probable of the given ones."""
    prompt, answer = str(sample["arguments"][0][0]), sample["resps"][0][0]
    text = ""
    about: Answer | None = None
    requests: list[tuple[str, str, float, bool]] = []
    if isinstance(answer, str):
        text, about = answer, model.answers[prompt, answer]
    elif isinstance(answer, tuple | list):
        pairs = zip(sample["arguments"], sample["resps"], strict=True)
        requests = [(str(given[0]), str(given[1]), float(each[0][0]), bool(each[0][1])) for given, each in pairs]
        choices = [each for each in requests if each[0]]  # without those of mutual information, which have no prompt
        asked, text, _, _ = max(choices or requests, key=lambda each: each[2])
        about = model.answers[asked, text]
        if len({each[0] for each in choices}) > 1:  # the choices are in the prompts
            text = asked + text
    return {
        "id": f"{task}/{sample['doc_id']}",
        "task": task,
        "prompt": unmarked(prompt),
        "answer": str(sample["target"]),
        "text": unmarked(text),
        "tokens": 0 if about is None else about.tokens,
        "finish_reason": "read" if about is None else about.finish_reason,  # a document, which asks for nothing
        "requests": [
            {"prompt": unmarked(asked), "text": text, "logprob": logprob, "greedy": greedy}
            if asked != prompt else {"text": text, "logprob": logprob, "greedy": greedy}
            for asked, text, logprob, greedy in requests
        ],
        "values": {},
    }  # fmt: skip


def _number(value: Any) -> float | None:
    """Return a row's value of a metric; None where it has only meaning together with those of all rows."""
    number = float(value) if isinstance(value, Real | np.bool_) else math.nan
    return number if math.isfinite(number) else None


def _plain(value: Any) -> Any:
    """Return the value as JSON has it, and what has no such form as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = _number(value)
    return str(value) if number is None else number
