"""Worker processes of a reward server on one address, restarted when they die. Loads no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.errors import StageError, one_line
from rlhf_core.reward_server.settings import Serving

if TYPE_CHECKING:
    from fastapi import FastAPI

_START_SECONDS = 120  # a worker that does not answer its supervisor so long is hung; it answers while it loads
_STOP_SECONDS = 60  # for requests that are being answered
# Workers end by a signal. Python's tracker then removes the semaphores that they had, and says so as a warning.
_QUIET_TRACKER = "ignore::UserWarning:multiprocessing.resource_tracker"


@dataclass(frozen=True, slots=True)
class RewardApplication:
    """Makes the application in a worker process, whose first modules must load at once: it answers its supervisor."""

    serving: Serving

    def __call__(self) -> FastAPI:
        from rlhf_core.reward_server.app import reward_app

        return reward_app(self.serving)


def serve(application: Callable[[], FastAPI], listener: socket.socket, workers: int) -> None:
    """Answer on `listener` until SIGINT or SIGTERM; requests that are being answered are answered first.

    application: makes that of a worker process, which gets it pickled, through a pipe.
    Raises StageError if a worker cannot start.
    """
    from uvicorn import Config
    from uvicorn.config import STARTUP_FAILURE

    from rlhf_core.reward_server.protocol import Protocol
    from rlhf_core.reward_server.supervisor import Supervisor

    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), _QUIET_TRACKER)))
    config = Config(
        application, factory=True, http=Protocol, workers=workers, lifespan="on", access_log=False,
        log_level="warning", server_header=False, proxy_headers=False,
        timeout_worker_healthcheck=_START_SECONDS, timeout_graceful_shutdown=_STOP_SECONDS,
    )  # fmt: skip
    supervisor = Supervisor(config, sockets=[listener])
    supervisor.run()
    if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
        raise StageError("the reward server could not start: its workers say why above")


def listening(host: str, port: int) -> socket.socket:
    """Raises StageError if the address is not free, or is none of this machine."""
    if not host.strip():
        raise StageError("--host is empty: give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (UnicodeError, TypeError) as error:  # no name of a host: Python has several words for it
        raise StageError(f"--host {one_line(host)[:80]}: no host can be called so: give an address") from error
    except OSError as error:
        why = str(error.strerror).partition(" (while attempting")[0]  # Python appends the address
        raise StageError(
            f"cannot listen on {one_line(host)[:80]}, port {port} ({why}): give another --port or --host"
        ) from error
