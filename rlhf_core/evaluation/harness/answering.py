"""The parent of the harness's process: it answers its requests by engines, and returns its rows and aggregates.

A request `score` has the tokens of a `context` and a `continuation`; its answer is the continuation's log-prob, and
whether greedy decoding gives it, false unless `greedy` asks for that. A request `generate` has the tokens of a `prompt`
and its sampling; its answer is the sampled tokens and the finish reason.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.config.engines.rollout import SamplingConfig
from rlhf_core.errors import StageError, reason_of
from rlhf_core.processes.lines import LineProcess, ProcessError
from rlhf_core.rollout.engine import Request, RolloutEngine, SamplingParameters
from rlhf_core.rollout.engines import Engines, survive_dead_engines
from rlhf_core.training.randomness import derived_seed

_PROGRAM = "rlhf_core.evaluation.harness.process"

Rows = list[dict[str, Any]]  # see running.py
# (part, compute) -> the rows of a part, as stages.partial_rows.PartialRows.rows
Kept = Callable[[str, Callable[[], list[Any]]], list[Any]]
Answers = Callable[[int, Sequence[Mapping[str, Any]]], list[Any]]  # of requests, given the number of the first


def run_harness(
    settings: Mapping[str, Any],
    answers: Mapping[str, Answers],
    kept: Kept,
    *,
    folder: Path,
    progress: Callable[[int, int, str], None],
) -> tuple[Rows, dict[str, Any]]:
    """Return the rows of all tasks, and the harness's aggregates.

    settings: as run_tasks reads them. answers: by what is asked. folder: working folder, from which tasks name their
    data. progress: called with requests answered, their number, and what they ask. Raises StageError.
    """
    rows: Rows = []
    with closing(LineProcess(["-u", "-m", _PROGRAM], folder=folder)) as process:
        reply: Any = settings
        while True:
            message = _exchange(process, reply)
            if "error" in message:
                raise StageError(message["error"])
            if "results" in message:
                return rows, message["results"]
            reply = None
            if "rows" in message:
                rows += message["rows"]
                continue
            asked, first, items = message["ask"], message["first"], message["items"]
            compute = partial(answers[asked], first, items)
            reply = kept(f"{asked}-{first}-{_digest(items)}", compute)
            progress(first + len(items), message["total"], asked)


def _exchange(process: LineProcess, message: Any) -> dict[str, Any]:
    try:
        received: dict[str, Any] = process.exchange(message, None)
    except ProcessError as error:
        raise StageError(f"the process of lm-evaluation-harness {error}; see the log") from error
    except ValueError as error:
        raise StageError(
            f"the process of lm-evaluation-harness replied with invalid JSON: {reason_of(error)}"
        ) from error
    return received


def _digest(items: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of requests, by which their answers are kept: other code may build others."""
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()[:16]


class EngineAnswers:
    """Answers of engines, started at the first request."""

    def __init__(self, engines: Callable[[], Engines], stop_token_ids: tuple[int, ...], seed: int) -> None:
        """stop_token_ids: of completions. seed: of sampled ones."""
        self._engines, self._stop_token_ids, self._seed = engines, stop_token_ids, seed

    def score(self, first: int, items: Sequence[Mapping[str, Any]]) -> list[tuple[float, bool]]:
        sequences = [[*item["context"], *item["continuation"]] for item in items]
        logprobs = self._share(RolloutEngine.logprobs, sequences)
        greedy = self._greedy([item for item in items if item["greedy"]])
        return [
            (math.fsum(each[len(item["context"]) :]), item["greedy"] and _begins(greedy, item))
            for item, each in zip(items, logprobs, strict=True)
        ]

    def _greedy(self, items: Sequence[Mapping[str, Any]]) -> dict[tuple[int, ...], Sequence[int]]:
        """Return the greedy continuation of each context, as long as the longest that it is compared with."""
        lengths: dict[tuple[int, ...], int] = {}
        for item in items:
            context = tuple(item["context"])
            lengths[context] = max(lengths.get(context, 0), len(item["continuation"]))
        requests = [Request(context, _greedily(most), None) for context, most in lengths.items()]
        completions = self._share(RolloutEngine.generate, requests)
        return {context: each.token_ids for context, each in zip(lengths, completions, strict=True)}

    def generate(self, first: int, items: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], str]]:
        requests = [self._request(number, item) for number, item in enumerate(items, first)]
        completions = self._share(RolloutEngine.generate, requests)
        return [(list(each.token_ids), each.finish_reason) for each in completions]

    def _request(self, number: int, item: Mapping[str, Any]) -> Request:
        sampling = {name: value for name, value in item.items() if name != "prompt"}
        try:
            config = SamplingConfig.model_validate_json(json.dumps(sampling))
        except ValueError as error:
            raise StageError(f"generation_kwargs of a task: {reason_of(error)}") from error
        seed = derived_seed(self._seed, f"benchmark: request {number}") if config.temperature else None
        return Request(item["prompt"], SamplingParameters.of(config, self._stop_token_ids), seed)

    def _share(self, method: Callable[..., list[Any]], items: Sequence[Any]) -> list[Any]:
        if not items:
            return []
        engines = self._engines()
        what = f"{len(items)} requests are answered again"
        return survive_dead_engines(lambda: engines.share(method, items), engines.replace_dead, what)


def _greedily(tokens: int) -> SamplingParameters:
    return SamplingParameters(temperature=0.0, top_p=1.0, max_tokens=tokens, stop_token_ids=())


def _begins(greedy: Mapping[tuple[int, ...], Sequence[int]], item: Mapping[str, Any]) -> bool:
    continuation = list(item["continuation"])
    return list(greedy[tuple(item["context"])][: len(continuation)]) == continuation
