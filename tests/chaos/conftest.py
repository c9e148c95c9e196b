"""One stack for all files of this folder; afterwards nothing of it is left."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client

from tests.chaos.scenario import Place, processes_left, started_stack

LONG = os.environ.get("CHAOS_LONG") == "1"  # set by `make chaos`


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("chaos")
    with pytest.MonkeyPatch.context() as patch, started_stack(folder, patch, long=LONG) as place:
        yield place
    assert processes_left(place) == set()


@pytest.fixture
def client(place: Place) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client
