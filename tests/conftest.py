"""For all tests: the two kinds of store, no hub, their tiers, and which run in one process, the longest first."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from deployments.stack.environment import RECIPES
from rlhf_core.processes.child_process import ChildProcess
from tests import plugin
from tests.cluster import prefect_api, ray_address, ray_folder, warm_socket
from tests.forked_children import forked_children
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
os.environ["ALIGNMENT_STACK_DIR"] = "/nonexistent"  # not the checkout's stack, whose services may be down
# By default Ray's processes give way to all others, and so its tests, the longest, to those of the other process.
os.environ.setdefault("RAY_worker_niceness", "0")
# A shell's background jobs ignore Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def plugin_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example plugin is installed."""
    return plugin.install(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def example_plugin(plugin_site: Path) -> Iterator[None]:
    """The tables have the lines of the example plugin."""
    with plugin.visible(plugin_site):
        yield


pytest_plugins = ["tests.tiers", "tests.durations"]

# Each starts a Ray head, a Prefect server or a stack for its group alone; two groups run beside each other.
GROUPS = {
    "tests/chaos/": "chaos",
    "tests/two_nodes/": "two nodes",
    "tests/slurm/": "two nodes",
    "tests/flows/": "prefect",
    "tests/deployments/test_cluster_room.py": "prefect",
    "tests/deployments/test_logs.py": "ray",
    "tests/deployments/test_stack.py": "ray",
    "tests/tasks/": "prefect",
    "tests/rlhf_core/actors/": "ray",
    "tests/rlhf_core/stages/test_rl.py": "ray",
    "tests/rlhf_core/stages/test_rl_matrix.py": "ray",
    "tests/rlhf_core/stages/test_sft_ranks.py": "ray",
}


def group_of(nodeid: str) -> str:
    """Tests of one group, by default those of a file, run in one process."""
    return next((group for path, group in GROUPS.items() if nodeid.startswith(path)), nodeid.partition("::")[0])


@pytest.hookimpl(trylast=True)  # once tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest group first: else one process has it left when the other has ended."""
    from tests.durations import expected, stored  # after pytest has loaded it as a plugin

    durations = stored()
    seconds: defaultdict[str, float] = defaultdict(float)
    for item in items:
        seconds[group_of(item.nodeid)] += expected(item.nodeid, durations)
    items.sort(key=lambda item: seconds[group_of(item.nodeid)], reverse=True)


@pytest.hookimpl(trylast=True)  # once the test's own fixtures have ended
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The services of a group end with it: idle ones take a tenth of the processors."""
    if nextitem is None or group_of(nextitem.nodeid) == group_of(item.nodeid):
        return
    for name in ("prefect_api", "warm_socket"):  # and what depends on them; a later test starts them again
        for definition in item.session._fixturemanager.getfixturedefs(name, item) or ():
            definition.finish(item._request)  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Collect tests without garbage collection: what they load stays, and would be walked over a dozen times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude what is loaded from garbage collection, which each stage in this process ends with: half a second."""
    if "rlhf_core.training.deepspeed_engine" in sys.modules:
        from tests import known_layouts

        known_layouts.remember()
    gc.collect()
    gc.freeze()


class Scheduling(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


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


@pytest.fixture(scope="session")
def engine_process() -> Iterator[ChildProcess]:
    """One for all engines of the session."""
    with forked_children():
        process = ChildProcess("the engines' process")
    with process:
        yield process


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Each ChildProcess is a fork."""
    with forked_children():
        yield
