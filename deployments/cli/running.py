"""`alignment logs` and `cancel`: the output of a run's jobs, and their end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer

from deployments.cli import panels
from deployments.cli.completion import run_ids
from deployments.cli.documents.runs import CancelledRun, LogLine
from deployments.cli.output import Printed, printing
from deployments.cli.prefect_settings import import_prefect
from rlhf_core.errors import StackError

app = typer.Typer()

RUN = typer.Argument(help="ID of a run, as listed by `alignment runs`.", autocompletion=run_ids)
OF = typer.Argument(
    help="ID of a run, stage/key, or a node as named by `alignment plan`, of which the newest job is meant.",
    metavar="RUN_OR_STAGE",
    autocompletion=run_ids,
)


class Process(StrEnum):
    driver = "driver"
    rank = "rank"
    engine = "engine"


@printing(app, panels.RUNS)
def logs(
    of: Annotated[str, OF],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the jobs have ended.")] = False,
    process: Annotated[Process | None, typer.Option(help="Print only lines of this kind of process.")] = None,
) -> Iterator[Printed[LogLine]]:
    """Print the output of the jobs of a run or a stage: driver, ranks and engines.

    Logs of jobs that the Ray cluster no longer knows come from the store, which keeps the end of each.
    """
    from deployments.cli.job_lines import followed_lines, stored_lines
    from tasks.ray_jobs import connect  # Ray takes a second

    found = followed_lines(connect(patience=10), of) if follow else stored_lines(lambda: connect(patience=10), of)
    for line in found:
        if process in (None, line.process):
            source = line.stage if line.pid is None else f"{line.stage} {line.process} {line.pid}"
            yield Printed(line, [f"{source} | {line.line}"])


@printing(app, panels.RUNS)
def cancel(run: Annotated[str, RUN]) -> Printed[CancelledRun]:
    """Cancel a run, and wait until its jobs have stopped.

    Jobs that another run follows too continue. Finished stages stay in the store.
    """
    import_prefect()
    from prefect.client.orchestration import get_client

    from deployments.cli.cancelling import cancel_run
    from deployments.cli.prefect_runs import read_run
    from deployments.cli.prefect_server import answers_of, prefect_api

    with answers_of(prefect_api()), get_client(sync_client=True) as client:
        flow_run = read_run(client, run)
        if flow_run.state is not None and flow_run.state.is_final():
            raise StackError(f"the run {run} has ended already ({flow_run.state_name}): there is nothing to cancel")
        state = cancel_run(client, flow_run.id, "`alignment cancel`", lambda text: print(text, file=sys.stderr))
    return Printed(CancelledRun(run, state.name or ""), [f"the run {run} is {(state.name or 'ended').lower()}"])
