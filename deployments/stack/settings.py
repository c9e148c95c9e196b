"""Settings of a stack: its folder, its ports and its generated credentials."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deployments.stack.environment import BUCKET, QUIET
from deployments.stack.files import read_values
from rlhf_core.errors import StackError

LOOPBACK = "127.0.0.1"
PORTS: Mapping[str, tuple[str, ...]] = {
    "s3": (
        "s3",
        "s3_grpc",
        "s3_master",
        "s3_master_grpc",
        "s3_volume",
        "s3_volume_grpc",
        "s3_filer",
        "s3_filer_grpc",
        "s3_admin",
        "s3_admin_grpc",
    ),
    "ray": ("ray", "ray_dashboard", "ray_agent", "ray_client"),
    "prefect": ("prefect",),
}
SHORT = Path("/tmp")  # noqa: S108 (see Stack.link; SeaweedFS creates its sockets there too)
# Below the ephemeral ports of the kernel and above the ports of Ray's workers (10002-19999), so that the port of a
# service is still free when it restarts.
_CHOICE = range(20000, 32000)


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack on this machine. `owned`: the services that it starts, a subset of s3, ray, prefect."""

    folder: Path
    owned: frozenset[str]
    ports: Mapping[str, int]
    access_key: str
    secret_key: str
    ray_token: str
    prefect_password: str

    @property
    def link(self) -> Path:
        """A short link to the folder: the path of a Unix socket is limited to 107 characters, and Ray adds 70."""
        return SHORT / f"alignment-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:10]}"

    @property
    def temporary(self) -> Path:
        """The temporary folder of all its processes, below the link: a link to one that `down` removes."""
        return self.link / "tmp"

    def url(self, port: str) -> str:
        return f"http://{LOOPBACK}:{self.ports[port]}"

    def log(self, service: str) -> Path:
        return self.folder / "logs" / f"{service}.log"

    def environment(self) -> dict[str, str]:
        """The variables that point a command, flow or job to the services of this stack."""
        environment = dict(QUIET)
        if "s3" in self.owned:
            environment |= {
                "ALIGNMENT_STORE": f"s3://{BUCKET}",
                "AWS_ENDPOINT_URL": self.url("s3"),
                "AWS_ACCESS_KEY_ID": self.access_key,
                "AWS_SECRET_ACCESS_KEY": self.secret_key,
                "AWS_REGION": "us-east-1",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",  # else clients try to reach a cloud's metadata server
            }
        if "ray" in self.owned:
            # Explicit, because by default Ray requires a token only if the user's home folder has one.
            environment |= {
                "RAY_API_SERVER_ADDRESS": self.url("ray_dashboard"),
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self.ray_token,
            }
        if "prefect" in self.owned:
            environment |= {
                "PREFECT_API_URL": self.url("prefect") + "/api",
                "PREFECT_HOME": str(self.folder / "prefect"),
                # Prefect's defaults of these ignore PREFECT_HOME.
                "PREFECT_LOCAL_STORAGE_PATH": str(self.folder / "prefect" / "storage"),
                "PREFECT_MEMO_STORE_PATH": str(self.folder / "prefect" / "memo_store.toml"),
                "PREFECT_API_AUTH_STRING": self._prefect_login,
            }
        return environment

    def server_environment(self) -> dict[str, str]:
        """The secrets in a service's environment that no client needs."""
        return {"PREFECT_SERVER_API_AUTH_STRING": self._prefect_login} if "prefect" in self.owned else {}

    @property
    def _prefect_login(self) -> str:
        return f"alignment:{self.prefect_password}"


def open_stack(folder: Path, owned: frozenset[str], environment: Mapping[str, str], *, running: bool) -> Stack:
    """Return the stack of `folder`, which is created if it is new.

    A stored port that is in use is replaced, unless the stack is `running`. Raises StackError if a port given by
    `ALIGNMENT_PORT_<NAME>` is in use or not a port number, or a file is damaged.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    names = [name for service in PORTS if service in owned for name in PORTS[service]]
    ports = _ports(folder, names, environment, running=running)
    return Stack(folder, owned, ports, **_credentials(folder))


def _ports(folder: Path, names: list[str], environment: Mapping[str, str], *, running: bool) -> dict[str, int]:
    file = folder / "ports.json"
    stored = stored_ports(folder)
    ports = dict(stored)
    for name in names:
        variable = f"ALIGNMENT_PORT_{name.upper()}"
        requested = environment.get(variable)
        if requested:
            in_use_by_us = running and stored.get(name) == int_or_none(requested)
            ports[name] = _requested(variable, requested, in_use_by_us=in_use_by_us)
        elif name not in ports or not (running or is_free(ports[name])):
            ports[name] = _free_port(folder, taken=set(ports.values()))
    write_private(file, json.dumps(ports, indent=1) + "\n")
    return ports


def stored_ports(folder: Path) -> dict[str, int]:
    """Return the ports that the last `up` chose. Raises StackError if the file is damaged."""
    return read_values(folder / "ports.json", "port numbers", _port)


def _port(value: object) -> int | None:
    return value if isinstance(value, int) and 1 <= value <= 65535 else None


def int_or_none(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= 5 else None


def _requested(variable: str, text: str, *, in_use_by_us: bool) -> int:
    port = int_or_none(text)
    if port is None or not 1024 <= port <= 65535:
        raise StackError(f"{variable} is {text!r}: set it to a port number from 1024 to 65535")
    if not in_use_by_us and not is_free(port):
        raise StackError(f"{variable} is port {port}, which another process uses: free it or choose another")
    return port


def _free_port(folder: Path, taken: set[int]) -> int:
    # Start at a port derived from the folder, so that stacks on one machine seldom collide.
    start = int(hashlib.sha256(str(folder).encode()).hexdigest(), 16) % len(_CHOICE)
    for step in range(len(_CHOICE)):
        port = _CHOICE[(start + step) % len(_CHOICE)]
        if port not in taken and is_free(port):
            return port
    raise StackError(f"no free port between {_CHOICE.start} and {_CHOICE.stop}")


def is_free(port: int) -> bool:
    """Return whether no process listens on the port on loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _credentials(folder: Path) -> dict[str, str]:
    file = folder / "credentials.json"
    stored = read_values(file, "texts", _credential)
    sizes = {"access_key": 10, "secret_key": 20, "ray_token": 32, "prefect_password": 16}  # bytes; Ray wants 32
    credentials = {name: stored.get(name) or secrets.token_hex(size) for name, size in sizes.items()}
    if credentials != stored:
        write_private(file, json.dumps(credentials, indent=1))
    return credentials


def _credential(value: object) -> str | None:
    return value if isinstance(value, str) and value.isascii() and value.isprintable() else None


def write_private(file: Path, text: str) -> None:
    """Replace `file` by one that only the user can read, at any moment."""
    new = file.with_name(file.name + ".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
    new.replace(file)
