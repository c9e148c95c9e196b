"""The network as this node sees it."""

from __future__ import annotations

import socket

import psutil


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
