"""A vLLM engine in a child process, for a process that trains: vLLM would take its process group, and end it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.rollout.child_output import ChildOutput, kept_output
from rlhf_core.rollout.child_process import ChildProcess
from rlhf_core.rollout.engine import EngineSettings, Request, RolloutEngine, ServedTensor
from rlhf_core.rollout.vllm_environment import take_temporary_folder
from rlhf_core.threads import use_threads
from rlhf_core.types import Completion

_engines: dict[int, Any] = {}  # in the child
_numbers = itertools.count()


class ChildEngine(RolloutEngine):
    """A VllmEngine in `process`, which may have several; what it raises is raised here."""

    def __init__(self, process: ChildProcess, folder: Path, settings: EngineSettings) -> None:
        self._process = process
        self._number = next(_numbers)
        process.call(_start, self._number, folder, settings)

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        completions: list[Completion] = self._call("generate", requests, keep_prefixes=keep_prefixes)
        return completions

    def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
        completions: dict[int, Completion] = self._call("advance", requests, abandoned=abandoned)
        return completions

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        logprobs: list[list[float]] = self._call("logprobs", sequences)
        return logprobs

    def forget(self) -> None:
        self._call("forget")

    def load_weights(self, folder: Path, version: int) -> None:
        self._call("load_weights", folder, version)

    @property
    def weight_version(self) -> int:
        return self._process.call(_weight_version, self._number)

    def served(self) -> tuple[ServedTensor, ...]:
        served: tuple[ServedTensor, ...] = self._call("served")
        return served

    def sleep(self, *, keep_weights: bool) -> None:
        self._call("sleep", keep_weights=keep_weights)

    def wake(self) -> None:
        self._call("wake")

    def shutdown(self) -> None:
        self._call("shutdown")

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._process.call(_call, self._number, method, arguments, options)


@contextmanager
def engine_in_child(
    folder: Path, settings: EngineSettings, environment: Mapping[str, str] = {}, output: ChildOutput | None = None
) -> Iterator[ChildEngine]:
    """A vLLM engine in a process of its own, which ends with this context. environment: further variables of it;
    output: see ChildProcess."""
    threads = {"OMP_NUM_THREADS": str(settings.config.num_threads), "HF_HUB_OFFLINE": "1"}
    with ChildProcess("the engine's process", threads | dict(environment), output) as process:
        engine = ChildEngine(process, folder, settings)
        yield engine
        engine.shutdown()


@contextmanager
def quiet_engine(folder: Path, settings: EngineSettings) -> Iterator[ChildEngine]:
    """As `engine_in_child`; what libraries print there is shown if the context ends with an error."""
    with kept_output() as output, engine_in_child(folder, settings, output=output) as engine:
        yield engine


def _start(number: int, folder: Path, settings: EngineSettings) -> None:
    if not _engines:
        take_temporary_folder()
    use_threads(settings.config.num_threads)
    from rlhf_core.rollout.vllm_engine import VllmEngine

    _engines[number] = VllmEngine(folder, settings)


def _call(number: int, method: str, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    return getattr(_engines[number], method)(*arguments, **options)


def _weight_version(number: int) -> int:
    return int(_engines[number].weight_version)
