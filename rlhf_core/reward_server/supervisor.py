"""The supervisor of a reward server's worker processes: uvicorn's, which can be ended while workers start."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import Multiprocess, Process

_POLL_SECONDS = 0.5
_READY_SECONDS = 5.0  # that a worker which answers requests may take to say so


class Supervisor(Multiprocess):
    """Finds at once that a worker dies while it is asked whether it is alive, and that a signal has come."""

    def init_processes(self) -> None:
        for _ in range(self.processes_num):
            self.handle_signals()
            if self.should_exit.is_set():
                return
            self.processes.append(self._started())

    def keep_subprocess_alive(self) -> None:
        for index, process in enumerate(self.processes):
            process.child_conn.close()  # the worker has its own: the pipe ends when the worker does
            if self._answers(process):
                continue
            if self.signal_queue:
                return
            process.kill()  # it is hung, or dead
            process.join()
            if process.exitcode == STARTUP_FAILURE:  # each other would fail in the same way
                self.should_exit.set()
                return
            self.processes[index] = self._started()

    def terminate_all(self) -> None:
        """Those that answer requests end in order. Those that still start have nothing to end, and may take long."""
        if not self.processes:
            return
        with ThreadPoolExecutor(len(self.processes)) as pool:
            ready = list(pool.map(lambda process: process.is_ready(_READY_SECONDS), self.processes))
        for process, is_ready in zip(self.processes, ready, strict=True):
            if not is_ready and process.exitcode is None:
                process.kill()
        super().terminate_all()

    def _started(self) -> Process:
        process = Process(self.config, self.sockets)
        process.start()
        return process

    def _answers(self, process: Process) -> bool:
        """Whether the worker is alive; False too if a signal comes before it has said so."""
        deadline = time.monotonic() + self.config.timeout_worker_healthcheck
        try:
            process.parent_conn.send(b"ping")
            while not self.signal_queue and time.monotonic() < deadline:
                if process.parent_conn.poll(_POLL_SECONDS):
                    process.parent_conn.recv()
                    return True
        except (OSError, EOFError):
            return False
        return False
