from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhf_core.rollout.child_process import ChildProcess


@pytest.fixture(scope="session")
def engine_process() -> Iterator[ChildProcess]:
    """One for all engines of the session, since importing vLLM is what takes the time."""
    with ChildProcess("the engines' process") as process:
        yield process
