"""The command lines of containers. No daemon runs here: the contract is kept by a program in place of docker."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.config.environments.runtimes import ContainerRuntime
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.runtimes.base import Image
from rlhf_core.runtimes.container import Containers
from tests.rlhf_core.runtimes.service import Docker, docker_in

pytestmark = pytest.mark.parts

REAL = shutil.which("docker")
CONFIG = ContainerRuntime(type="container", memory_gib=0.5, processes=99)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with docker_in(tmp_path, docker := Docker()):
        yield docker


def test_the_command_lines_of_an_episode(docker: Docker) -> None:
    context = {"Dockerfile": b"FROM debian:13\n", "data/a": b"1"}

    async def use(containers: Containers) -> None:
        image = Image(context=context, variables={"A": "a b"})
        first, second = await asyncio.gather(containers.start(image), containers.start(image))
        assert (await first.run("echo $A $B", 20.0, {"B": "2"})).output == "a b 2\n"
        await first.write({"x": b"1"})
        assert await first.read("x") == b"1"
        first.stop()
        second.stop()

    containers = Containers(CONFIG)
    asyncio.run(use(containers))
    containers.close()
    assert docker.containers == {}, "all are removed"
    assert docker.contexts == [{"Dockerfile": "FROM debian:13\n", "data/a": "1"}], "an image is built once"
    assert docker.lines[0] == ["ps", "-q"]
    run = next(line for line in docker.lines if line[0] == "run")
    name, label, tag = run[4], run[6], run[-3]
    assert run == [
        "run", "--rm", "--interactive", "--name", name, "--label", label, "--memory", "536870912b",
        "--pids-limit", "99", "--security-opt", "no-new-privileges", "--network", "none", "--env",
        "A=a b", "--entrypoint", "bash", tag, "-c", "read -r _",
    ]  # fmt: skip
    assert tag.startswith("alignment-task:")
    (executed,) = [line for line in docker.lines if "B=2" in line]
    assert executed == ["exec", "--env", "B=2", executed[3], "bash", "-c", "exec 2>&1\necho $A $B"]
    assert ["exec", executed[3], "bash", "-c", "kill -KILL -1"] in docker.lines
    assert ["rm", "--force", name] in docker.lines
    if REAL is not None:
        _require_parsed(REAL, docker.lines)


def _require_parsed(program: str, lines: list[list[str]]) -> None:
    """Have docker's own client parse each kind of line: it then finds no daemon."""
    nowhere = {**os.environ, "DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    for line in {each[0]: each for each in lines}.values():
        ended = subprocess.run(
            [program, *line], env=nowhere, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        parsed = "connect to the docker" in ended.stderr.lower() or "docker daemon" in ended.stderr.lower()
        built = line[0] == "build" and "unable to prepare context" in ended.stderr  # its folder is gone
        assert parsed or built, (line, ended.stderr)


def test_a_container_that_does_not_start(docker: Docker) -> None:
    containers = Containers(CONFIG)
    with pytest.raises(EpisodeError, match="its container has not started: Unable to find image 'missing'"):
        asyncio.run(containers.start(Image(name="missing")))
    with pytest.raises(StageError, match="neither the task nor the runtime `container` names an image"):
        asyncio.run(containers.start(Image()))
    containers.close()


def test_a_node_without_a_program_or_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program := tmp_path / "podman").write_text("#!/bin/sh\necho 'no daemon' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(StageError, match=r"`podman ps` failed on this node, .*: no daemon"):
        Containers(ContainerRuntime(type="container", program="podman"))
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(StageError, match="needs `docker`, which this node does not have"):
        Containers(CONFIG)
