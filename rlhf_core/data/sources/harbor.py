"""Task folders of Harbor: task.toml, instruction.md, environment/, tests/; each is one row."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.data.sources import HarborSource
from rlhf_core.config.environments.harbor import COLUMN, HarborTask
from rlhf_core.contract import StageContext
from rlhf_core.data.formats.base import Row, RowError
from rlhf_core.data.sources.base import BadRow, Located, RowSource
from rlhf_core.errors import reason_of

_SETTINGS, _INSTRUCTION = "task.toml", "instruction.md"
_DEPTH = 6  # folders between the named one and a task
_MOST_BYTES = 4 * 2**20  # of the files of a task
_SECONDS = 600.0  # of the tests, if the task has no limit


class HarborTasks(RowSource[HarborSource]):
    def rows(self, context: StageContext, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        yield from iterate_tasks(context.user_folder(self.config.folder), self.config.folder, bad_row)

    def first_rows(self, root: Path, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        yield from iterate_tasks(root / self.config.folder, self.config.folder, bad_row)

    def is_whole(self, rows: int, root: Path) -> bool:
        return True


def iterate_tasks(folder: Path, shown: str, bad_row: BadRow) -> Iterator[Located]:
    """Yield a row for each task below a folder, with its place. shown: the folder as the recipe has it.

    bad_row: called for each task that cannot be read. Raises RowError if there is none.
    """
    try:
        tasks = _tasks(folder)
    except OSError as error:
        raise RowError(f"{shown}: this folder of tasks cannot be read ({error.strerror})") from error
    if not tasks:
        raise RowError(f"{shown}: there is no folder of a task, which has a {_SETTINGS}")
    for task in tasks:
        place = task.relative_to(folder).as_posix()
        where = shown if place == "." else f"{shown}/{place}"
        try:
            row = _read(task)
        except RowError as error:
            bad_row(where, error)
        except OSError as error:
            bad_row(where, RowError(f"cannot be read ({error.strerror})"))
        else:
            yield where, row


def _tasks(folder: Path) -> list[Path]:
    found = []
    pending = [(folder, 0)]
    while pending:
        here, depth = pending.pop()
        if (here / _SETTINGS).is_file():
            found.append(here)
        elif depth < _DEPTH:
            below = (entry for entry in here.iterdir() if entry.is_dir() and not entry.name.startswith("."))
            pending += [(entry, depth + 1) for entry in below]
    return sorted(found)


def _read(task: Path) -> Row:
    """Return the row of a task, without its solution. Raises RowError for one that an episode here cannot play."""
    try:
        settings = tomllib.loads((task / _SETTINGS).read_text(encoding="utf-8"))
        instruction = (task / _INSTRUCTION).read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise RowError(f"it has no {_INSTRUCTION}, or is a task of several steps, which are not supported") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RowError(f"{_SETTINGS} or {_INSTRUCTION} cannot be read: {reason_of(error)}") from error
    if not instruction:
        raise RowError(f"{_INSTRUCTION} is empty")
    of_task, verifier, environment = (_table(settings, name) for name in ("task", "verifier", "environment"))
    files = {part: dict(_contents(task / part)) for part in ("environment", "tests")}
    _refuse(settings, verifier, environment, files)
    read = HarborTask(
        environment=files["environment"],
        tests=files["tests"],
        image=_text(environment, "docker_image"),
        variables=_variables(environment),
        test_variables=_variables(verifier),
        test_seconds=_seconds(verifier),
    )
    return {"prompt": instruction, "task": _text(of_task, "name") or task.name, COLUMN: read.column()}


def _refuse(
    settings: Mapping[str, Any],
    verifier: Mapping[str, Any],
    environment: Mapping[str, Any],
    files: Mapping[str, Mapping[str, bytes]],
) -> None:
    if "test.sh" not in files["tests"]:
        raise RowError("it has no tests/test.sh, which writes the reward")
    if settings.get("steps"):
        raise RowError("it is a task of several steps, which are not supported")
    if any(name.startswith("docker-compose") for name in files["environment"]):
        raise RowError("its environment is of several containers, which are not supported")
    if environment.get("os", "linux") != "linux":
        raise RowError(f"its environment is of the system {environment['os']!r}: only linux is supported")
    if environment.get("mcp_servers"):
        raise RowError("its environment has MCP servers, which are not supported in tasks")
    if verifier.get("environment_mode", "shared") != "shared":
        raise RowError("its tests require a container of their own, which is not supported")
    if sum(len(content) for part in files.values() for content in part.values()) > _MOST_BYTES:
        raise RowError(f"its files have more than {_MOST_BYTES // 2**20} MiB: put large ones into its image")


def _contents(folder: Path) -> Iterable[tuple[str, bytes]]:
    size = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            size += path.stat().st_size
            if size > _MOST_BYTES:
                raise RowError(f"its files have more than {_MOST_BYTES // 2**20} MiB: put large ones into its image")
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def _table(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = settings.get(name, {})
    if not isinstance(table, Mapping):
        raise RowError(f"`{name}` of {_SETTINGS} must be a table")
    return table


def _text(table: Mapping[str, Any], name: str) -> str | None:
    value = table.get(name)
    if value is not None and not (isinstance(value, str) and value):
        raise RowError(f"`{name}` of {_SETTINGS} must be text, this is {value!r}")
    return value


def _variables(table: Mapping[str, Any]) -> dict[str, str]:
    variables = table.get("env", {})
    if not isinstance(variables, Mapping) or not all(isinstance(value, str) for value in variables.values()):
        raise RowError(f"`env` of {_SETTINGS} must have variables and their texts")
    if named := next((name for name, value in variables.items() if "${" in value), None):
        raise RowError(f"`env.{named}` of {_SETTINGS} is a variable of the machine, and none are passed to a runtime")
    return dict(variables)


def _seconds(table: Mapping[str, Any]) -> float:
    seconds = table.get("timeout_sec", _SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 604_800:
        raise RowError(f"`timeout_sec` of {_SETTINGS} must be a number of seconds, this is {seconds!r}")
    return float(seconds)
