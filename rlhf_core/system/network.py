"""The network as this node sees it."""

from __future__ import annotations

import socket

import psutil

from rlhf_core.errors import StageError, one_line


def interface_towards(address: str) -> str | None:
    """The network interface from which this node reaches `address` (host:port); None if that cannot be determined."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket: chooses the route and sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(a.address == own for a in addresses)), None)


def own_address() -> str:
    """Return this node's address on the network of its default route. Raises StageError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of documentation; a datagram socket sends nothing
        except OSError as error:
            raise StageError(
                f"this node has no route to a network ({error.strerror}), so its own address is unknown: set "
                "`environment.network.host`"
            ) from error
        return str(probe.getsockname()[0])


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises StageError if the address is in use, or is none of this machine."""
    if not host.strip():
        raise StageError("--host is empty: give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (UnicodeError, TypeError) as error:  # not a host name, for which Python has several errors
        raise StageError(f"--host {one_line(host)[:80]}: no host can be called so: give an address") from error
    except OSError as error:
        reason = str(error.strerror).partition(" (while attempting")[0]  # Python appends the address
        raise StageError(
            f"cannot listen on {one_line(host)[:80]}, port {port} ({reason}): give another --port or --host"
        ) from error
