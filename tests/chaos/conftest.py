"""The local stack that tests of kills run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client

from tests.chaos.scenario import Place, processes_left, started_stack


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("chaos")
    with pytest.MonkeyPatch.context() as patch, started_stack(folder, patch) as place:
        yield place
    assert processes_left(place) == set()


@pytest.fixture
def client(place: Place) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client
