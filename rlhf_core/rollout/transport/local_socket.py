"""Messages in JSON, with file descriptors, between two processes of one machine and user, over Unix sockets."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rlhf_core.errors import reason_of
from rlhf_core.rollout.transport.base import TransportError

_LONGEST_MESSAGE = 65536  # bytes


class Listener:
    """Accepts connections at `name`, an abstract address: it ends with its process and is no file."""

    def __init__(self, name: str, backlog: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(_address(name))
            self._socket.listen(backlog)
        except BaseException:
            self._socket.close()
            raise

    def accept(self, deadline: float, version: int, seconds: float) -> Connection:
        """Return the next connection. Raises TransportError if there is none at `deadline` (time.monotonic)."""
        with _explained(version, seconds):
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            connected, _ = self._socket.accept()
        return Connection(connected, version, seconds)

    def close(self) -> None:
        self._socket.close()


class Connection:
    """Raises TransportError if the other end has failed, does not answer in time, or refuses."""

    def __init__(self, connected: socket.socket, version: int, seconds: float) -> None:
        """version: of the weights, for errors. Raises TransportError if the other process is another user's."""
        self._socket, self._version, self._seconds = connected, version, seconds
        self._socket.settimeout(seconds)
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            connected.close()
            raise TransportError(f"version {version} did not travel: user {user} is at the other end of its socket")

    @classmethod
    def to(cls, name: str, version: int, seconds: float) -> Self:
        """Connect to the listener `name`. Raises ConnectionRefusedError if there is none on this machine."""
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connecting.connect(_address(name))
        except BaseException:
            connecting.close()
            raise
        return cls(connecting, version, seconds)

    def tell(self, descriptors: Sequence[int] = (), **message: Any) -> None:
        with _explained(self._version, self._seconds):
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(descriptors))

    def hear(self, descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
        """Return the next message, and up to `descriptors` descriptors."""
        with _explained(self._version, self._seconds):
            content, received, _, _ = socket.recv_fds(self._socket, _LONGEST_MESSAGE, descriptors)
            if not content:
                raise ConnectionResetError("it has closed its connection")
        message: dict[str, Any] = json.loads(content)
        if "refused" in message:
            raise TransportError(f"version {self._version} did not travel: {message['refused']}")
        return message, received

    def require(self, **expected: Any) -> None:
        """Raise TransportError, at both ends, unless the next message is `expected`."""
        message, _ = self.hear()
        if message != expected:
            refused = f"the other end has {message}, not {expected}"
            self.tell(refused=refused)
            raise TransportError(f"version {self._version} did not travel: {refused}")

    def close(self) -> None:
        self._socket.close()


def _address(name: str) -> str:
    return f"\0{name}"


@contextmanager
def _explained(version: int, seconds: float) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # also a timeout
        raise TransportError(
            f"version {version} did not travel: another process of its transport has failed, or was not there within "
            f"{seconds:g} s ({reason_of(error)})"
        ) from error
