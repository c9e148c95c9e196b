"""What is killed while a node is held after a step, and how the run continues. Each function returns when it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.chaos.scenario import DRIVER, ENGINE, RANK, SUPERVISOR, Run, await_service, kill, processes, service

Kill = Callable[[Run, str, int], None]


def _flow(run: Run, node: str, step: int) -> None:
    """The worker marks the run as crashed. A Retry follows the job, which has continued."""
    kill(run.flow_processes())
    assert run.wait_for_its_end().name == "Crashed"
    run.retry()


def _both(run: Run, node: str, step: int) -> None:
    """An automation of the Prefect server marks the run as crashed."""
    worker = service("worker")
    kill([worker, *run.flow_processes()])
    assert "no heartbeat for" in (run.wait_for_its_end().message or "")
    run.restore_automations()
    await_service("worker", worker)
    run.retry()


def _service(name: str) -> Kill:
    """It is started again by supervisord; the flow and its job continue."""

    def kill_it(run: Run, node: str, step: int) -> None:
        flow, process = run.flow_processes(), service(name)
        kill([process])
        await_service(name, process)
        assert run.state().name == "Running"
        assert run.flow_processes() == flow

    return kill_it


def _process_of_the_job(title: str) -> Kill:
    """All of the job ends; after a Retry another job resumes from the newest checkpoint."""

    def kill_it(run: Run, node: str, step: int) -> None:
        kill(processes(run.place, title))
        _resume(run, node, step)

    return kill_it


def _service_with_its_jobs(name: str) -> Kill:
    """Ray's head, or the warm process, whose forks are the jobs, ranks and engines: these die with it."""

    def kill_it(run: Run, node: str, step: int) -> None:
        process = service(name)
        kill([process])
        await_service(name, process)
        _resume(run, node, step)

    return kill_it


def _resume(run: Run, node: str, step: int) -> None:
    run.let_go()
    assert run.wait_for_its_end().name == "Failed"
    run.retry()
    assert run.resumed_after(node) >= step  # no step is repeated but those since the newest checkpoint


KILLS: Mapping[str, Kill] = {
    "both": _both,
    "flow": _flow,
    "worker": _service("worker"),
    "server": _service("prefect"),
    "S3": _service("s3"),
    "rank": _process_of_the_job(RANK),
    "driver": _process_of_the_job(DRIVER),
    "supervisor": _process_of_the_job(SUPERVISOR),
    "warm": _service_with_its_jobs("warm"),
    "head": _service_with_its_jobs("ray"),
}


def kill_engine(run: Run, node: str, step: int) -> None:
    """The job starts it again, and goes on."""
    kill(processes(run.place, ENGINE))
    run.let_go()
