"""For all tests: the two kinds of store, no hub, and which tests run in one process, which first."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from deployments.stack.environment import RECIPES
from tests.cluster import prefect_api, ray_address, ray_folder, warm_socket
from tests.services import S3Server, s3_prefix

__all__ = [
    "prefect_api",
    "ray_address",
    "ray_folder",
    "warm_socket",
]  # fixtures: one warm process, one Ray head, one Prefect server for all tests that ask

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # without a hub each look-up hangs for half a minute
# Left alone, Ray asks for a token or not, as the home folder has one or not (`ray.init` makes one).
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("ALIGNMENT_RECIPES", str(RECIPES))
# By default Ray's processes give way to all others, and so its tests, the longest, to those of the other process.
os.environ.setdefault("RAY_worker_niceness", "0")
# A shell's background jobs ignore Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What may take longest comes first: else one process has it left when the others have ended."""

    def seconds(item: pytest.Item) -> float:
        timeout = item.get_closest_marker("timeout")
        return float(timeout.args[0]) if timeout else 0.0

    items.sort(key=seconds, reverse=True)


WITH_SERVICES = (
    "tests/chaos/",
    "tests/two_nodes/",
    "tests/deployments/test_cluster_room.py",
    "tests/deployments/test_stack.py",
    "tests/flows/",
    "tests/tasks/",
    "tests/rlhf_core/actors/",
    "tests/rlhf_core/stages/test_rl.py",
    "tests/rlhf_core/stages/test_rl_killed_vllm.py",
    "tests/rlhf_core/stages/test_sft_ranks.py",
)


class Scheduling(LoadScopeScheduling):
    """One process runs all tests of a file, and all that need Ray or a Prefect server: each starts once.

    Such tests wait much, and start many processes at once: beside others like them both would take longer.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return "services" if nodeid.startswith(WITH_SERVICES) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One SeaweedFS for all tests, with the bucket `tests`."""
    server = S3Server()
    try:
        server.start()
        server.create_bucket("tests")
        yield server
    finally:
        server.close()


@pytest.fixture
def s3_store_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    return s3_prefix(s3_server, monkeypatch)


@pytest.fixture
def local_store_url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture(params=["local", "s3"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Each test that takes this runs on both kinds of store."""
    url: str = request.getfixturevalue(f"{request.param}_store_url")
    return url
