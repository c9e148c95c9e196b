"""Fixtures for all tests: the two kinds of store, and no hub."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.stack.environment import RECIPES
from tests.cluster import prefect_api, ray_address
from tests.services import S3Server

__all__ = ["prefect_api", "ray_address"]  # fixtures: one Ray head, one Prefect server for all tests that ask

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # without a hub each look-up hangs for half a minute
# Left alone, Ray asks for a token or not, as the home folder has one or not (`ray.init` makes one).
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("ALIGNMENT_RECIPES", str(RECIPES))


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
    """A prefix of the real S3 server that no other test uses; the AWS variables are set."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://tests/{uuid.uuid4().hex}"


@pytest.fixture
def local_store_url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture(params=["local", "s3"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Each test that takes this runs on both kinds of store."""
    url: str = request.getfixturevalue(f"{request.param}_store_url")
    return url
