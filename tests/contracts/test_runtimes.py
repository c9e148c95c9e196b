"""Runtimes keep one contract."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.config.environments.runtimes import ContainerRuntime, RemoteRuntime, SandboxRuntime
from rlhf_core.runtimes import Image, Runtime, RuntimeHost, open_runtimes
from rlhf_core.testing.runtime import RuntimeContract
from tests.rlhf_core.runtimes.service import Docker, Service, docker_in, serving

pytestmark = pytest.mark.parts

IMAGE = "ALIGNMENT_TEST_IMAGE"


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
    """The command line of docker, as a program that keeps its containers in sandboxes: it needs no daemon."""

    image = Image(name="debian:13")
    hasty_seconds = 10.0
    passes_output_on = False  # by the program: docker itself would

    @pytest.fixture(autouse=True)
    def _docker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        with docker_in(tmp_path, Docker()):
            yield

    def make(self) -> RuntimeHost:
        return open_runtimes(ContainerRuntime(type="container"))

    @pytest.mark.slow("waits for the limit")
    @pytest.mark.endurance("benchmarks")  # a command of this program starts in seconds, which the limit allows for
    def test_a_time_limit_kills_every_process_of_a_command(self, runtimes: RuntimeHost) -> None:
        super().test_a_time_limit_kills_every_process_of_a_command(runtimes)


@pytest.mark.skipif(IMAGE not in os.environ, reason=f"needs a daemon: {IMAGE} names an image with bash and coreutils")
class TestDocker(RuntimeContract):
    """Docker itself. Each runtime is of an image that it builds."""

    hasty_seconds = 5.0

    def make(self) -> RuntimeHost:
        self.image = Image(context={"Dockerfile": f"FROM {os.environ[IMAGE]}\nWORKDIR /app\n".encode()})
        return open_runtimes(ContainerRuntime(type="container", memory_gib=0.25, processes=32))

    def test_processes_that_were_killed_do_not_count(self, runtimes: RuntimeHost) -> None:
        async def use(runtime: Runtime) -> list[str]:
            command = "for i in $(seq 24); do sleep 60 & done; echo begun"
            return [(await runtime.run(command, 20.0)).output for _ in range(3)]

        assert self.used(runtimes, use) == ["begun\n"] * 3
