"""The verifier `math`: an answer is right if it is mathematically equivalent to the row's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rlhf_core.config.rewards.verifiers import VerifierConfig
from rlhf_core.errors import RewardError
from rlhf_core.processes.user_process import UserFunction, UserProcess

_FILE = Path(__file__).parent / "isolated" / "math_equivalence.py"
_FUNCTION = UserFunction(_FILE, "equivalent", "verifier math", ("answer", "completion", "extracted"))
_SEARCHED = 10_000  # characters of a completion, from its end: the search for mathematics takes quadratic time
_LONGEST_ANSWER = 10_000  # characters that a pattern has found: more are no answer
_MOST_PROCESSES = 4


class MathAnswers:
    """Compares in processes of its own. One that does not end in time is killed, and its answer is wrong."""

    metrics = ("timed_out",)

    @classmethod
    def of(cls, config: VerifierConfig) -> MathAnswers:
        return cls(config.timeout_seconds, extracted=config.pattern is not None)

    def __init__(self, seconds: float, *, extracted: bool) -> None:
        """extracted: answers are what a pattern has found, not whole texts."""
        self._seconds, self._extracted = seconds, extracted
        self.workers = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
        self._idle: SimpleQueue[UserProcess] = SimpleQueue()
        self._processes = [UserProcess(_FUNCTION) for _ in range(self.workers)]
        for process in self._processes:
            self._idle.put(process)
        self._readable: set[str] = set()  # answers of rows that were parsed

    def judge(self, answer: str, row: Mapping[str, Any]) -> dict[str, float]:
        expected = str(row["answer"])
        if self._extracted and len(answer) > _LONGEST_ANSWER:
            return {"reward": 0.0}
        with self._process() as process:
            if expected not in self._readable:  # apart: what is wrong with it is not the completion's fault
                process.call([expected, None, self._extracted], self._seconds)
                self._readable.add(expected)
            try:
                reply = process.call([expected, answer[-_SEARCHED:], self._extracted], self._seconds)
            except RewardError as error:
                if isinstance(error.__cause__, TimeoutError):
                    return {"reward": 0.0, "timed_out": 1.0}
                raise
        return {"reward": reply["values"][0]}

    @contextmanager
    def _process(self) -> Iterator[UserProcess]:
        process = self._idle.get()
        try:
            yield process
        finally:
            self._idle.put(process)

    def close(self) -> None:
        for process in self._processes:
            process.close()
