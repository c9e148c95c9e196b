"""Runtimes keep one contract."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.config.environments.runtimes import ContainerRuntime, RemoteRuntime, SandboxRuntime
from rlhf_core.runtimes import Image, RuntimeHost, open_runtimes
from rlhf_core.testing.runtime import RuntimeContract
from tests.rlhf_core.runtimes.service import Docker, Service, docker_in, serving

pytestmark = pytest.mark.parts


class TestSandbox(RuntimeContract):
    def make(self) -> RuntimeHost:
        return open_runtimes(SandboxRuntime())


class TestRemote(RuntimeContract):
    """A service whose runtimes are sandboxes."""

    @pytest.fixture(autouse=True)
    def _service(self) -> Iterator[None]:
        with serving(Service()) as self.url:
            yield

    def make(self) -> RuntimeHost:
        return open_runtimes(RemoteRuntime(type="remote", url=self.url))


class TestContainer(RuntimeContract):
    """The command line of docker, as a program that keeps its containers in sandboxes: no daemon runs here."""

    image = Image(name="debian:13")
    hasty_seconds = 20.0
    passes_output_on = False  # by the program: docker itself would

    @pytest.fixture(autouse=True)
    def _docker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        with docker_in(tmp_path, Docker()):
            yield

    def make(self) -> RuntimeHost:
        return open_runtimes(ContainerRuntime(type="container"))
