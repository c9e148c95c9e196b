"""The process of a flow run, as the deployments start it: `python -m flows.process` in place of `prefect.engine`.

It is Prefect's engine with two differences (Prefect 3.7.7):

1. A flow that fails ends its process with status 1, from which the worker concludes that the run crashed. The server
   refuses that only while the run is in a final state, so a run that was retried meanwhile became Crashed. Here the
   status is 0 once the run has a final state from this attempt.
2. The output goes to a file and not through a pipe to the worker: otherwise the first line after the worker's death
   ends the flow. The worker also deletes its temporary directory, our working directory, if two attempts of a run
   overlap; so that is the folder of our packages.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from uuid import UUID

HOME = Path(__file__).resolve().parents[1]  # the root of a checkout, or site-packages


def main() -> int:
    """Run the flow, and return the process's exit status."""
    os.chdir(HOME)
    from prefect.settings import get_current_settings  # only now: it looks for files in the working directory

    run_id = UUID(os.environ["PREFECT__FLOW_RUN_ID"])
    log = get_current_settings().home / "flow-runs" / f"{run_id}-{os.getpid()}.log"
    terminal = _redirect_output(log)
    earlier = _final_states(run_id)
    status = _run_engine()
    if status and not _final_states(run_id) - earlier:
        os.write(terminal, f"the flow run {run_id} ended with status {status}, its output is in {log}\n".encode())
        return status
    log.unlink(missing_ok=True)  # Prefect has it all
    return 0


def _redirect_output(log: Path) -> int:
    """Redirect standard output and error to the file `log`; return a descriptor of their previous target."""
    log.parent.mkdir(parents=True, exist_ok=True)
    before = os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    return before


def _final_states(run_id: UUID) -> set[UUID]:
    """Return the final states of all attempts. After a Retry the current state is that of the next attempt."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return {state.id for state in client.read_flow_run_states(run_id) if state.is_final()}


def _run_engine() -> int:
    sys.argv = ["prefect.engine"]  # it reads the run's id from its arguments, or from the environment
    try:
        runpy.run_module("prefect.engine", run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
