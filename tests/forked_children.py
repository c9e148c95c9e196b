"""Processes as forks of one that has imported DeepSpeed and vLLM, which takes a fresh process ten seconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from typing import Any

import pytest

from rlhf_core.processes import child_process

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])


@contextmanager
def forked_children() -> Iterator[None]:
    """Within it a ChildProcess is such a fork, and no fresh Python, which tests/rlhf_core/processes has."""

    def executor(
        workers: int, _: BaseContext, initializer: Callable[..., None], initargs: tuple[Mapping[str, str], Any]
    ) -> ProcessPoolExecutor:
        given, output = initargs
        environment = {**os.environ, **given}  # the fork has that of its server
        return ProcessPoolExecutor(workers, FORKS, _begin, (initializer, environment, output))

    with ProcessPoolExecutor(1, FORKS) as pool:
        pool.submit(int).result()  # their server prints while it imports, which is not the output of a test
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "ProcessPoolExecutor", executor)
        yield


def _begin(initializer: Callable[..., None], environment: Mapping[str, str], output: Any) -> None:
    """In the fork, where what its server has loaded stays out of collections: an engine ends with gc.unfreeze."""
    gc.freeze = gc.unfreeze = lambda: None
    os.environ.clear()
    os.environ.update(environment)
    initializer({}, output)
