"""The transports of `rollout.transport`. A new one is a file beside this, a line here, and its name in the setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from rlhf_core.rollout.transport import collective, folder, ipc
from rlhf_core.rollout.transport.base import Offer, Transport

# Each yields the transport of one publish, on every rank that sends, and releases its resources at the end.
TRANSPORTS: Mapping[str, Callable[[Offer], AbstractContextManager[Transport]]] = {
    "folder": folder.offered,
    "collective": collective.offered,
    "ipc": ipc.offered,
}
