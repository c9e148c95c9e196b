from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.rlhf_core.rollout.engine_process import start_process


@pytest.fixture(scope="session")
def engine_process() -> Iterator[ProcessPoolExecutor]:
    process = start_process()
    yield process
    process.shutdown()
