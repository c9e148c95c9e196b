"""Search for and termination of a stack's processes, including those that have left its process tree."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

MARKER = "ALIGNMENT_STACK_SERVICE"


def processes_of(folder: Path, service: str = "", sessions: Iterable[int] = ()) -> set[psutil.Process]:
    """Return all live processes of the stack in `folder`, or of one of its services, with all their descendants.

    A process is recognised by the marker in its environment, or by a session or process group in `sessions`, because
    Ray's agents overwrite their environment with their title. Excludes this process and its ancestors.
    """
    mark = f"{folder}:{service}"
    groups = set(sessions)
    own_pids = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    children: defaultdict[int, list[psutil.Process]] = defaultdict(list)
    processes: set[psutil.Process] = set()
    for process in psutil.process_iter(["ppid"]):
        if process.pid in own_pids:
            continue
        children[process.info["ppid"]].append(process)
        if _is_marked(process, mark, bool(service)) or _is_in(process, groups):
            processes.add(process)
    parents = list(processes)
    while parents:
        of_one = [child for child in children[parents.pop().pid] if child not in processes]
        processes.update(of_one)
        parents += of_one
    return {process for process in processes if _is_alive(process)}


def end(processes: set[psutil.Process], patience: float = 10.0) -> None:
    """Send SIGTERM, and SIGKILL to those that are alive after `patience` seconds."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(list(processes), timeout=patience)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=patience)


def _is_marked(process: psutil.Process, mark: str, whole: bool) -> bool:
    try:
        value: str = process.environ().get(MARKER, "")
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # the process has ended, or belongs to another user
        return False
    return value == mark if whole else value.startswith(mark)


def _is_in(process: psutil.Process, groups: set[int]) -> bool:
    if not groups:
        return False
    try:
        return os.getsid(process.pid) in groups or os.getpgid(process.pid) in groups
    except ProcessLookupError:
        return False


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
