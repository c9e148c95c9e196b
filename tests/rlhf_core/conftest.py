"""What tests of the library share: both kinds of store, a small Ray cluster, one without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray

from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.stages.in_process import InProcessCluster, engine_in
from rlhf_core.warm.client import SOCKET_VARIABLE


@pytest.fixture
def repository(store_url: str) -> ArtifactRepository:
    return ArtifactRepository(open_store(store_url))


@pytest.fixture
def local(local_store_url: str) -> ArtifactRepository:
    return ArtifactRepository(open_store(local_store_url))


@pytest.fixture(scope="session")
def _ray(warm_socket: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOCKET_VARIABLE, str(warm_socket))
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False
        )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def ray_cluster(_ray: None, warm_socket: Path) -> Iterator[None]:
    """Its actors are forks of the warm process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOCKET_VARIABLE, str(warm_socket))
        yield


@pytest.fixture(scope="session")
def in_process(engine_process: ChildProcess) -> InProcessCluster:
    """Without Ray, and with real engines."""
    return InProcessCluster(partial(engine_in, engine_process))
