"""The Prefect worker of the local stack: `python -m flows.worker --pool alignment --name NAME`.

It is Prefect's process worker with two differences (Prefect 3.7.7). There the runner and the worker each report a
killed process, and a run that was retried between the two reports became Crashed: here only the runner reports it. And
with each heartbeat this one ends the runs that were taken and never started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import warnings
from typing import Any

from prefect.settings import get_current_settings
from prefect.utilities.processutils import setup_signal_handlers_worker
from prefect.workers.process import ProcessWorker, ProcessWorkerResult

from flows.never_started import end_never_started
from rlhf_core.errors import VariableError
from rlhf_core.system.variables import check_all

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # that it replaces ProcessWorker: intended

    class FlowWorker(ProcessWorker):
        """Runs the flow runs of a work pool as processes."""

        async def sync_with_backend(self) -> None:
            await super().sync_with_backend()
            if self._client is not None:
                await end_never_started(self._client)

        async def run(self, *args: Any, **kwargs: Any) -> ProcessWorkerResult:
            result = await super().run(*args, **kwargs)
            return ProcessWorkerResult(status_code=0, identifier=result.identifier)  # or the worker reports it too


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.worker", description="Run the flow runs of a work pool.")
    parser.add_argument("--pool", required=True)
    parser.add_argument("--name")
    arguments = parser.parse_args()
    try:
        check_all()
    except VariableError as error:
        sys.exit(f"error: {error}")
    setup_signal_handlers_worker(os.getpid(), "the worker", print)
    worker = FlowWorker(
        name=arguments.name,
        work_pool_name=arguments.pool,
        heartbeat_interval_seconds=int(get_current_settings().worker.heartbeat_seconds),
    )
    try:
        asyncio.run(worker.start())
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("the worker has stopped", flush=True)


if __name__ == "__main__":
    main()
