"""The transports of `rollout.transport`. A new one is a file beside this, a line here, and its name in the setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from rlhf_core.rollout.transport import collective, folder, ipc
from rlhf_core.rollout.transport.base import Offer, Transport

# Each yields the transport of one publish, and releases its resources at the end; None on ranks that have no part.
TRANSPORTS: Mapping[str, Callable[[Offer], AbstractContextManager[Transport | None]]] = {
    "folder": folder.offered,
    "collective": collective.offered,
    "ipc": ipc.offered,
}
