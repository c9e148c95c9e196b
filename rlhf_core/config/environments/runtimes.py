"""Settings of runtimes, in which an episode's commands run. `RUNTIMES` lists all kinds.

A new kind is a file in rlhf_core/runtimes, its config class, and one line there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from rlhf_core.config.base import operational
from rlhf_core.config.environments.dockerfile import read_dockerfile
from rlhf_core.config.numbers import GiB, ProcessesOfCommand, Requests, Seconds
from rlhf_core.config.plugins import Table
from rlhf_core.config.servers import ServerConfig
from rlhf_core.config.texts import NonEmpty
from rlhf_core.config.typed import TypedConfig
from rlhf_core.errors import RecipeError


class RuntimeConfig(TypedConfig):
    """Base of every kind of runtime."""

    family: ClassVar[str] = "runtime"

    @classmethod
    def table(cls) -> Table[Any]:
        return RUNTIMES

    def check_image(self, name: str | None, dockerfile: str | None) -> None:
        """Raise RecipeError if a task's runtime cannot be started.

        name: of the task's image. dockerfile: the text from which it is built instead.
        """


class SandboxRuntime(RuntimeConfig):
    """Namespaces of this node: its programs, read-only, files of the runtime's own, and no network but a loopback.

    Of a Dockerfile it follows WORKDIR, ENV, COPY and RUN.
    """

    type: Literal["sandbox"] = "sandbox"
    memory_gib: GiB = Field(default=1.0, description="memory limit of a command's processes together, GiB")
    disk_gib: GiB = Field(default=0.25, description="limit of its files together, GiB")
    processes: ProcessesOfCommand = Field(default=64, description="maximum number of a command's processes")

    def check_image(self, name: str | None, dockerfile: str | None) -> None:
        if dockerfile is not None:
            read_dockerfile(dockerfile)
        elif name is not None:
            raise RecipeError(f"the image {name} needs the runtime `container` or `remote`: a sandbox has none")


class ContainerRuntime(RuntimeConfig):
    """A container of this node, by the command line of `docker` or `podman`."""

    type: Literal["container"]
    program: Literal["docker", "podman"] = operational("docker", description="the command line that is used")
    image: NonEmpty | None = Field(
        default=None, description="image of runtimes whose task has none of its own; pin it by `name@sha256:…`"
    )
    network: bool = Field(default=False, description="whether commands reach the network")
    memory_gib: GiB = Field(default=2.0, description="memory limit of a container, GiB")
    processes: ProcessesOfCommand = Field(default=512, description="maximum number of processes of a container")
    start_seconds: Seconds = operational(600.0, description="time limit of building an image and of starting")

    def check_image(self, name: str | None, dockerfile: str | None) -> None:
        if name is None and dockerfile is None and self.image is None:
            raise RecipeError("the task has no image: set the runtime's `image`")


class RemoteRuntime(RuntimeConfig, ServerConfig):
    """Runtimes of a service with the protocol of `docs/reference/runtimes.md`."""

    type: Literal["remote"]
    image: NonEmpty | None = Field(default=None, description="image of runtimes whose task has none of its own")
    timeout_seconds: Seconds = operational(
        120.0, description="time limit of a request, beyond that of its command; one that timed out is not retried"
    )
    requests_per_server: Requests = operational(64, description="maximum number of concurrent requests to a server")


@dataclass(frozen=True, slots=True)
class RuntimeEntry:
    config: type[RuntimeConfig]
    implementation: str  # "package.module:Class" of a runtimes.base.RuntimeHost, made by `of(config)`


RUNTIMES: Table[RuntimeEntry] = Table("runtimes", RuntimeEntry, {
    "sandbox": RuntimeEntry(SandboxRuntime, "rlhf_core.runtimes.sandbox:Sandboxes"),
    "container": RuntimeEntry(ContainerRuntime, "rlhf_core.runtimes.container:Containers"),
    "remote": RuntimeEntry(RemoteRuntime, "rlhf_core.runtimes.remote:RemoteRuntimes"),
})  # fmt: skip
