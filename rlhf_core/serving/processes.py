"""Worker processes of a reward server on one address, restarted when they die. Loads no torch."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.errors import StageError
from rlhf_core.serving.settings import Serving

if TYPE_CHECKING:
    from fastapi import FastAPI

_START_SECONDS = 120  # a worker that does not answer its supervisor so long is hung; it answers while it loads
_STOP_SECONDS = 60  # for requests that are being answered


@dataclass(frozen=True, slots=True)
class RewardApplication:
    """Makes the application in a worker process, whose first modules must load at once: it answers its supervisor."""

    serving: Serving

    def __call__(self) -> FastAPI:
        from rlhf_core.serving.app import reward_app

        return reward_app(self.serving)


def serve(application: Callable[[], FastAPI], host: str, port: int, workers: int) -> None:
    """Answer on `host` and `port` until SIGINT or SIGTERM; requests that are being answered are answered first.

    application: makes that of a worker process, which gets it pickled, through a pipe.
    Raises StageError if the address is not free, or a worker cannot start.
    """
    from uvicorn import Config
    from uvicorn.config import STARTUP_FAILURE
    from uvicorn.supervisors import Multiprocess

    class Supervisor(Multiprocess):
        """Finds at once that a worker dies while it is asked whether it is alive: the pipe to it ends then."""

        def keep_subprocess_alive(self) -> None:
            for process in self.processes:
                process.child_conn.close()  # the worker has its own
            super().keep_subprocess_alive()

    config = Config(
        application, factory=True, host=host, port=port, workers=workers, lifespan="on", access_log=False,
        log_level="warning", server_header=False, proxy_headers=False,
        timeout_worker_healthcheck=_START_SECONDS, timeout_graceful_shutdown=_STOP_SECONDS,
    )  # fmt: skip
    with listening(host, port) as listener:
        supervisor = Supervisor(config, sockets=[listener])
        supervisor.run()
    if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
        raise StageError("the reward server could not start: its workers say why above")


def listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise StageError(
            f"cannot listen on {host}, port {port} ({error.strerror}): give another --port or --host"
        ) from error
