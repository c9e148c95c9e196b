"""Registration of the deployments of deployments/prefect.yaml with the Prefect server."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from ruamel.yaml import YAML

from deployments.stack.environment import HOME, python_path
from rlhf_core.errors import StackError
from rlhf_core.recipe.known_recipes import known_recipes

DEPLOYMENTS = HOME / "deployments" / "prefect.yaml"
# Names of the automations; here, since importing automations.py imports Prefect.
NO_HEARTBEAT, NEVER_STARTS = "alignment: runs without a heartbeat", "alignment: runs that never start"
_AUTOMATIONS = Path(__file__).with_name("automations.py")
_SECONDS = 30.0  # that the server may take to answer
_SET = ("active", "schedule", "parameters")
_SOURCES = ("flows", "tasks", "rlhf_core/config")  # these define the typed parameters of the deployments


def register_deployments(folder: Path, environment: Mapping[str, str]) -> bool:
    """Run `prefect deploy --all` and create the automations. Returns False, without doing it, if all are up to date.

    Raises StackError if the file is missing or Prefect rejects it.
    """
    if not DEPLOYMENTS.is_file():
        raise StackError(f"{DEPLOYMENTS} does not exist, so no deployment can be registered")
    stamp = folder / "registered"
    state = _digest(environment["PREFECT_API_URL"])
    with _server(environment) as server:
        if stamp.is_file() and stamp.read_bytes() == state.encode() and _are_there(server):
            return False
        _register(server, environment, folder / "logs" / "deploy.log")
    stamp.write_text(state)
    return True


def _register(server: httpx.Client, environment: Mapping[str, str], log: Path) -> None:
    """Register the deployments; enabled schedules are kept."""
    log.write_bytes(b"")
    file = str(DEPLOYMENTS.relative_to(HOME))
    deploy = (str(Path(sys.executable).parent / "prefect"), "--no-prompt", "deploy", "--all", "--prefect-file", file)
    create = (sys.executable, "-m", "deployments.stack.automations")
    enabled = _enabled_schedules(server)
    with ThreadPoolExecutor() as threads:  # each takes seconds to import Prefect
        started = [
            threads.submit(_run, "`prefect deploy --all`", deploy, environment, log),
            threads.submit(_run, "creating the automations", create, environment, log),
        ]
    for done in started:
        done.result()
    now = _enabled_schedules(server)
    for path, schedule in enabled.items():
        if now.get(path) != schedule:
            server.patch(path, json=schedule).raise_for_status()


def _server(environment: Mapping[str, str]) -> httpx.Client:
    """Return an HTTP client, since importing Prefect takes a second."""
    user, _, password = environment.get("PREFECT_API_AUTH_STRING", "").partition(":")
    return httpx.Client(
        base_url=environment["PREFECT_API_URL"], auth=(user, password) if user else None, timeout=_SECONDS
    )


def _are_there(server: httpx.Client) -> bool:
    """Return whether the server still has all registered objects: anyone may have deleted them in the UI."""
    wanted = {entry["name"] for entry in YAML(typ="safe").load(DEPLOYMENTS)["deployments"]}
    wanted |= {NO_HEARTBEAT, NEVER_STARTS}
    answers = (server.post(f"/{kind}/filter", json={}) for kind in ("deployments", "automations"))
    return wanted <= {item["name"] for answer in answers for item in answer.raise_for_status().json()}


def _enabled_schedules(server: httpx.Client) -> dict[str, dict[str, Any]]:
    """Return the user's settings of each enabled schedule, by path: `prefect deploy` resets any of the same slug."""
    answer = server.post("/deployments/filter", json={}).raise_for_status()
    return {
        f"/deployments/{deployment['id']}/schedules/{schedule['id']}": {name: schedule[name] for name in _SET}
        for deployment in answer.json()
        for schedule in deployment["schedules"]
        if schedule["active"]
    }


def _run(what: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    done = subprocess.run(
        command,
        cwd=HOME,
        env={**environment, "PYTHONPATH": python_path()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    with log.open("a", encoding="utf-8") as file:
        file.write(done.stdout)
    if done.returncode:
        last = [line for line in done.stdout.splitlines() if line.strip()][-5:]
        raise StackError("\n  ".join([f"{what} failed:", *last, f"full log: {log}"]))


def _digest(server: str) -> str:
    """Return a value that changes with the server, the recipes' names and every file that defines the deployments."""
    files = [
        DEPLOYMENTS,
        _AUTOMATIONS,
        *(file for source in _SOURCES for file in sorted((HOME / source).rglob("*.py"))),
    ]
    digest = hashlib.sha256("\n".join([server, *known_recipes()]).encode())  # the form lists their names
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
