"""Fifty rounds of a job that publishes beside collections, on both kinds of store: nothing that is needed goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rlhf_core.garbage.test_collection import publish_beside_collections

pytestmark = [
    pytest.mark.endurance("chaos"),
    pytest.mark.slow("fifty rounds beside collections"),
    pytest.mark.timeout(1800),
]


def test_fifty_rounds_beside_collections_lose_nothing(store_url: str, tmp_path: Path) -> None:
    publish_beside_collections(store_url, tmp_path, rounds=50)
