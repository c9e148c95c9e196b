"""Stores keep one contract: a folder and a real S3 server."""

from __future__ import annotations

import pytest

from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.store import Store
from rlhf_core.testing.store import StoreContract

pytestmark = pytest.mark.parts


class TestStore(StoreContract):
    @pytest.fixture
    def store(self, store_url: str) -> Store:
        return open_store(store_url)
