"""vLLM engines for tests, in a process of their own: vLLM would take pytest's process group, and end it.

All engines of the session share that one process, since importing vLLM is what takes the time.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rlhf_core.config.rollout import RolloutEngineConfig
from rlhf_core.rollout.engine import SamplingParameters, ServedTensor
from rlhf_core.types import Completion

_engines: dict[int, Any] = {}  # in the engines' process
_numbers = itertools.count()


def start_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


class RemoteEngine:
    """A VllmEngine in `process`, with its interface; what it raises is raised here."""

    def __init__(self, process: ProcessPoolExecutor, folder: Path, config: RolloutEngineConfig, **options: Any) -> None:
        self._process = process
        self._number = next(_numbers)
        process.submit(_start, self._number, folder, config, options).result()

    def generate(self, prompts: Sequence[Sequence[int]], parameters: SamplingParameters) -> list[Completion]:
        completions: list[Completion] = self._call("generate", prompts, parameters)
        return completions

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        logprobs: list[list[float]] = self._call("logprobs", sequences)
        return logprobs

    def load_weights(self, folder: Path, version: int) -> None:
        self._call("load_weights", folder, version)

    @property
    def weight_version(self) -> int:
        return int(self._get("weight_version"))

    def served(self) -> tuple[ServedTensor, ...]:
        served: tuple[ServedTensor, ...] = self._call("served")
        return served

    def sleep(self, *, keep_weights: bool) -> None:
        self._process.submit(_sleep, self._number, keep_weights).result()

    def wake(self) -> None:
        self._call("wake")

    def in_worker(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function(vLLM's worker, *arguments)` returns: how the tests spoil what it serves."""
        return self._process.submit(_in_worker, self._number, function, arguments).result()

    def shutdown(self) -> None:
        self._call("shutdown")

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._process.submit(_call, self._number, method, arguments).result()

    def _get(self, name: str) -> Any:
        return self._process.submit(_get, self._number, name).result()


def _start(number: int, folder: Path, config: RolloutEngineConfig, options: dict[str, Any]) -> None:
    from rlhf_core.rollout.vllm_engine import VllmEngine

    _engines[number] = VllmEngine(folder, config, **options)


def _call(number: int, method: str, arguments: Sequence[Any]) -> Any:
    return getattr(_engines[number], method)(*arguments)


def _sleep(number: int, keep_weights: bool) -> None:
    _engines[number].sleep(keep_weights=keep_weights)


def _in_worker(number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return _engines[number]._llm.collective_rpc(function, args=arguments)[0]


def _get(number: int, name: str) -> Any:
    return getattr(_engines[number], name)
