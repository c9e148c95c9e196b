"""An engine in a child process, for a process that trains: in it, vLLM would use and destroy its process group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.processes.child_output import ChildOutput, kept_output
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.engine import EngineSettings, start_engine
from rlhf_core.rollout.engines import OneEngine

_engines: dict[int, Any] = {}  # in the child process
_numbers = itertools.count()


class ChildEngine(OneEngine):
    """An engine in `process`, which may have several. Its errors are raised in this process."""

    def __init__(self, process: ChildProcess, folder: Path, settings: EngineSettings) -> None:
        super().__init__()
        self._process = process
        self._number = next(_numbers)
        process.call(_start, self._number, folder, settings)

    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._process.call(_call, self._number, method, args, kwargs)


@contextmanager
def engine_in_child(
    folder: Path, settings: EngineSettings, environment: Mapping[str, str] = {}, output: ChildOutput | None = None
) -> Iterator[ChildEngine]:
    """Start an engine in a process of its own, which ends with the context.

    environment: additional variables of the process. output: see ChildProcess.
    """
    threads = {"OMP_NUM_THREADS": str(settings.config.num_threads), "HF_HUB_OFFLINE": "1"}
    with ChildProcess("the engine's process", threads | dict(environment), output) as process:
        engine = ChildEngine(process, folder, settings)
        yield engine
        engine.shutdown()


@contextmanager
def quiet_engine(folder: Path, settings: EngineSettings) -> Iterator[ChildEngine]:
    """Start an engine like `engine_in_child`, and print its output only if the context ends with an error."""
    with kept_output() as output, engine_in_child(folder, settings, output=output) as engine:
        yield engine


def _start(number: int, folder: Path, settings: EngineSettings) -> None:
    _engines[number] = start_engine(folder, settings)


def _call(number: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return getattr(_engines[number], method)(*args, **kwargs)
