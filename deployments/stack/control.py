"""`up`, `status` and `down` of the local stack."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock
import psutil

from deployments.stack.certificate import write_certificate
from deployments.stack.differences import differences, service_differences
from deployments.stack.environment import (
    SELECTORS,
    environment_file,
    external_services,
    merged_environment,
    recorded_environment,
    require_api_url,
    stack_folder,
)
from deployments.stack.ports import ListeningPort, listening_ports
from deployments.stack.processes import end, processes_of
from deployments.stack.registration import register_deployments
from deployments.stack.services import certificate_folder, services
from deployments.stack.settings import SHORT, Stack, open_stack, stored_ports, write_private
from deployments.stack.starting import await_all, problem_of, timeout
from deployments.stack.supervision import Supervisor, configuration, inherited_environment
from rlhf_core.errors import StackError
from rlhf_core.stages.job_context import workdir_root
from rlhf_core.system.scratch import sweep


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """`state`: working, failing (the process runs but does not respond), external, or supervisord's state."""

    name: str
    state: str
    url: str
    pid: int = 0
    uptime: float = 0.0  # seconds
    log: Path | None = None
    problem: str = ""

    @property
    def good(self) -> bool:
        return self.state in ("working", "external")


def up(report: Callable[[str], None] = print) -> Stack:
    """Start the services that are not running, wait until all work, and register the deployments.

    Idempotent. Never restarts a service that runs: if settings have changed since, it reports which and how to apply
    them. Raises StackError with the last log lines of a service that does not start.
    """
    folder = stack_folder()
    with _locked(folder):
        recorded = recorded_environment(folder)
        external = external_services(os.environ, recorded)
        _check_external(external)
        wanted = frozenset(SELECTORS) - external
        supervisor = Supervisor(folder, _link(folder))
        supervisord = _running(supervisor)
        owned = _owned(recorded) if supervisord else wanted
        stack = open_stack(folder, owned, {} if supervisord else os.environ, running=supervisord is not None)
        environment = {
            **merged_environment(inherited_environment(), stack.environment()), **stack.server_environment()
        }  # fmt: skip
        all_services = services(stack)
        config = configuration(stack, all_services)
        if supervisord is None:
            _stop(folder, supervisor)
            _start(stack, supervisor, config, environment)
        else:
            lines = service_differences(owned, wanted)
            lines += differences(stack, supervisord, (supervisor.running_config(), config), environment)
            states = supervisor.states()
            lines += [
                f"{s.name}: a service that is not in the running stack" for s in all_services if s.name not in states
            ]
            all_services = [service for service in all_services if service.name in states]
            _report_differences(lines, report)
            environment = supervisord.environ()
            os.environ.update(_selected(environment))  # the running services are checked below
        await_all(stack, supervisor, all_services, report)
        if register_deployments(folder, environment):
            report("deployments registered")
        return stack


def _running(supervisor: Supervisor) -> psutil.Process | None:
    """Return the process of supervisord if a service runs, or is about to."""
    pid = supervisor.pid()
    if pid is None:
        return None
    states = [process.state for process in supervisor.states().values()]
    return psutil.Process(pid) if {"RUNNING", "STARTING", "BACKOFF"} & {*states} else None


def _owned(recorded: Mapping[str, str]) -> frozenset[str]:
    return frozenset(name for name, variables in SELECTORS.items() if variables[0] in recorded)


def _selected(environment: Mapping[str, str]) -> dict[str, str]:
    names = [name for names in SELECTORS.values() for name in names]
    return {name: environment[name] for name in names if name in environment}


def _report_differences(lines: list[str], report: Callable[[str], None]) -> None:
    if lines:
        report("the stack keeps the settings that it was started with, which differ from those of this shell:")
        for line in lines:
            report(f"  {line}")
        report("apply them with `alignment down && alignment up`, which ends running jobs; run again to resume them")


def status() -> list[ServiceStatus]:
    """Return the status of every service, in the order in which they start. Raises StackError if there is no stack."""
    folder = stack_folder()
    recorded = recorded_environment(folder)
    if not recorded:
        raise StackError(f"there is no local stack in {folder}: start it with `alignment up`")
    owned = _owned(recorded)
    external = frozenset(SELECTORS) - owned
    stack = open_stack(folder, owned, {}, running=True)
    supervisor = Supervisor(folder, stack.link)
    states = supervisor.states() if supervisor.pid() is not None else {}
    lines = [ServiceStatus(name, "external", _external_url(name)) for name in SELECTORS if name in external]
    for service in services(stack):
        process = states.get(service.name)
        state, problem = (process.state.lower(), "") if process else ("stopped", "")
        if state in ("running", "starting"):
            problem = problem_of(service)
            state = ("failing" if state == "running" else state) if problem else "working"
        pid, uptime = (process.pid, time.time() - process.since) if process and process.pid else (0, 0.0)
        lines.append(ServiceStatus(service.name, state, service.url, pid, uptime, stack.log(service.name), problem))
    return lines


def ports() -> list[ListeningPort]:
    """Return all ports of the stack if it runs, with the protection of each."""
    folder = stack_folder()
    session = Supervisor(folder, _link(folder)).pid()
    if session is None:
        return []
    recorded = recorded_environment(folder)
    owned = frozenset(name for name, variables in SELECTORS.items() if variables[0] in recorded)
    return listening_ports(open_stack(folder, owned, {}, running=True), session)


def down(report: Callable[[str], None] = print) -> None:
    """Stop the services and end every process that they started; data, ports and credentials are kept."""
    folder = stack_folder()
    if not folder.is_dir():
        report("there is no local stack")
        return
    with _locked(folder):
        _stop(folder, Supervisor(folder, _link(folder)))
    for root in (workdir_root(), Path("/dev/shm")):  # noqa: S108 (where killed jobs leave their folders)
        sweep(root)
    report("the local stack is down")


def _start(stack: Stack, supervisor: Supervisor, config: str, environment: dict[str, str]) -> None:
    _end_leftovers(stack.folder, supervisor)  # of a supervisord that was killed
    shutil.rmtree(
        stack.folder / "ray", ignore_errors=True
    )  # sessions of earlier Ray heads, with the logs of their jobs
    for name in ("s3", "ray", "prefect"):
        (stack.folder / name).mkdir(exist_ok=True)
    _make_link(stack.folder, stack.link)
    stack.temporary.symlink_to(tempfile.mkdtemp(prefix="alignment-stack-"))
    lines = [f"{name}={value}\n" for name, value in stack.environment().items()]
    write_private(environment_file(stack.folder), "".join(lines))
    write_certificate(certificate_folder(stack))
    supervisor.start(config, environment)


def _stop(folder: Path, supervisor: Supervisor) -> None:
    link = _link(folder)
    pid = supervisor.pid()
    members = processes_of(folder, sessions=_sessions(supervisor))
    if pid is not None:
        supervisor.shutdown()
        _wait_until(lambda: supervisor.pid() is None, timeout())
    end({process for process in members if process.is_running()})
    _end_leftovers(folder, supervisor)
    _remove_temporary(folder / "tmp")
    if link.is_symlink():
        link.unlink()
    for file in (folder / "supervisord.pid", *folder.glob("*.sock"), *_weed_sockets(folder)):
        file.unlink(missing_ok=True)


def _remove_temporary(link: Path) -> None:
    """Remove the temporary files of the stack's processes, many of which are killed."""
    if link.is_symlink():
        shutil.rmtree(link.readlink(), ignore_errors=True)
        link.unlink()


def _end_leftovers(folder: Path, supervisor: Supervisor) -> None:
    leftovers = processes_of(folder, sessions=_sessions(supervisor))
    end(leftovers)
    alive = [process for process in leftovers if process.is_running() and process.status() != "zombie"]
    if alive:
        names = ", ".join(f"{process.pid} ({process.name()})" for process in alive)
        raise StackError(f"could not end the processes {names}: end them manually")


def _sessions(supervisor: Supervisor) -> list[int]:
    pid = supervisor.recorded_pid()
    return [] if pid is None else [pid]


def _check_external(external: frozenset[str]) -> None:
    if "prefect" in external:
        require_api_url(os.environ["PREFECT_API_URL"])
    if "s3" in external and not os.environ.get("ALIGNMENT_STORE"):
        raise StackError(
            "AWS_ENDPOINT_URL names an S3 server, so none is started: "
            "name the bucket with ALIGNMENT_STORE=s3://BUCKET, or unset AWS_ENDPOINT_URL"
        )


def _external_url(service: str) -> str:
    urls = [os.environ[name] for name in SELECTORS[service] if os.environ.get(name)]
    return urls[0] if urls else f"set {SELECTORS[service][0]}"


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.1)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with filelock.FileLock(folder / "lock", timeout=2 * timeout()):
            yield
    except filelock.Timeout as error:
        raise StackError(f"another `alignment up` or `down` holds {folder / 'lock'} for too long: end it") from error


def _link(folder: Path) -> Path:
    return Stack(folder, frozenset(), {}, "", "", "", "").link


def _make_link(folder: Path, link: Path) -> None:
    if not link.is_symlink():
        link.symlink_to(folder)
    elif link.lstat().st_uid != os.getuid() or link.readlink() != folder:
        raise StackError(f"{link} exists and does not belong to this stack: remove it")


def _weed_sockets(folder: Path) -> list[Path]:
    """Return the sockets that SeaweedFS leaves in /tmp when it is killed; its ports are in their names."""
    ports = stored_ports(folder)
    return [
        socket
        for name, port in ports.items()
        if name.startswith("s3_") and name.endswith("_grpc")
        for socket in SHORT.glob(f"seaweedfs-*-grpc-{port}.sock")
    ] + list(SHORT.glob(f"seaweedfs-s3-{ports.get('s3')}.sock"))
