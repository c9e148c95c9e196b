"""Preflight loading of the user's Python files in a process of their own: they must define the recipe's functions."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import IO

from rlhf_core.config.data.sources import FunctionSource
from rlhf_core.config.environments.environments import CodeEnvironment, FunctionEnvironment, ProgramConfig
from rlhf_core.config.environments.tools import FunctionTool
from rlhf_core.config.rewards.rewards import FunctionReward
from rlhf_core.config.user_code import beside
from rlhf_core.errors import RecipeError, RewardError
from rlhf_core.preflight.code import UserCode, check_files
from rlhf_core.processes.user_code import CodeKind, check_function, last_place
from rlhf_core.processes.user_process import UserFunction, UserProcess
from rlhf_core.system.scratch import scratch_folder

LOADING_SECONDS = 60.0
_ENDED = re.compile(r"its process (.+), before it returned")
_RAISED = re.compile(r"loading this file failed: (.+)")  # type and message, see user_error
_PARSING = Lock()  # ast.parse fails in two threads at a time, with a SystemError: gh-106905 of CPython
_SHOWN = 300  # characters of a line
_READ_BYTES = 4096  # of the end of a file's output
_MODULE_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^'\n]+)'")
_NOT_WITH_AN_ORCHESTRATOR = ("torch", "vllm", "deepspeed", "peft", "accelerate")  # see pyproject.toml


def code_problems(named: Sequence[tuple[str, UserCode]], root: Path) -> list[str]:
    """Return a problem for each setting whose code cannot be loaded. Files are loaded concurrently, each once."""
    keys = [config.model_dump_json() for _, config in named]
    files: dict[tuple[str, ...], dict[str, UserCode]] = {}
    for key, (_, config) in zip(keys, named, strict=True):
        files.setdefault((config.path, *config.files), {})[key] = config
    problems: dict[str, str] = {}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for problems_of_file in threads.map(lambda functions: _problems_of_file(functions, root), files.values()):
            problems |= problems_of_file
    return [f"{name}: {problems[key]}" for key, (name, _) in zip(keys, named, strict=True) if key in problems]


def _problems_of_file(functions: Mapping[str, UserCode], root: Path) -> dict[str, str]:
    """Return problems by the keys of `functions`, all of one file. It is loaded as its jobs will: with only the files
    in `files` beside it, in a process that is killed after LOADING_SECONDS.
    """
    problems: dict[str, str] = {}
    for key, config in functions.items():
        try:
            with _PARSING:
                check_function(root / config.path, config.function, config.path)
        except RecipeError as error:
            problems[key] = str(error)
    left = {key: config for key, config in functions.items() if key not in problems}
    if not left:
        return problems
    first = next(iter(left.values()))
    try:
        with _PARSING:
            check_files(first, root)
        with placed(root, first) as file:
            problems |= _refused(left, file)
    except RecipeError as error:  # of the file: of all its functions
        problems |= dict.fromkeys(left, str(error))
    return problems


def _refused(functions: Mapping[str, UserCode], file: Path) -> dict[str, str]:
    """Return the problems of functions with another signature than required. Raises RecipeError if the file cannot be
    loaded.
    """
    # The file's output is not part of the plan; and a job works in another folder than the user's.
    with tempfile.TemporaryFile() as log, scratch_folder("job") as folder:
        return _refused_with(functions, file, log, folder)


def _refused_with(functions: Mapping[str, UserCode], file: Path, log: IO[bytes], folder: Path) -> dict[str, str]:
    problems = {}
    process: UserProcess | None = None
    try:
        for key, config in functions.items():
            parameters = config.parameters if isinstance(config, CodeEnvironment | FunctionReward) else ()
            form = config.form if isinstance(config, FunctionReward | ProgramConfig) else "alignment"
            function = UserFunction(file, config.function, config.path, parameters, config.options, _kind(config), form)
            process = process or UserProcess(function, LOADING_SECONDS, log=log, folder=folder)
            try:
                process.load(function)
            except RecipeError as error:
                problems[key] = str(error)
    except RewardError as error:
        text, path = str(error), config.path
        missing = _MODULE_MISSING.search(text)
        if missing is None:
            raise RecipeError(_why(text, path, file.parent, _last_line(log))) from error
        if missing_here(text) is None:
            raise RecipeError(
                f"{path} imports `{missing[1]}`, which is not installed here: install it, here and on the "
                "cluster's nodes, or name it in `files` if it is a file of yours"
            ) from error
    finally:
        if process is not None:
            process.close()
    return problems


def missing_here(text: str) -> str | None:
    """Return the library missing in a process, from its error, if only jobs need it."""
    missing = _MODULE_MISSING.search(text)
    library = missing[1].partition(".")[0] if missing else ""
    return library if library in _NOT_WITH_AN_ORCHESTRATOR else None


def _kind(config: UserCode) -> CodeKind:
    if isinstance(config, FunctionTool):
        return "tool"
    if isinstance(config, ProgramConfig):
        return "program"
    if isinstance(config, FunctionSource):
        return "source"
    return "environment" if isinstance(config, FunctionEnvironment) else "function"


def _last_line(log: IO[bytes]) -> str:
    """Return the last line of the process's output."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - _READ_BYTES))
    lines = log.read().decode(errors="replace").split("\n")
    return next((" ".join(line.split())[:_SHOWN] for line in reversed(lines) if line.strip()), "")


def _why(text: str, path: str, folder: Path, last_line: str) -> str:
    """Return one sentence on the error of a process that failed to load the file.

    folder: the folder of the file. last_line: of its output.
    """
    if ended := _ENDED.search(text):
        last = f"; the last it wrote: {last_line}" if last_line else ""
        return f"{path} cannot be loaded: its process {ended[1]}, while it ran the file{last}"
    place, raised = last_place(text, path, folder), _RAISED.search(text)
    if place and raised:
        return f"{path} cannot be loaded: {place}: {_with_hint(raised[1])}"
    return f"{text}; load what takes long at the first call" if "within" in text else text


def _with_hint(raised: str) -> str:
    """Append a hint to the message of an exception. raised: its type and message."""
    if raised.startswith("FileNotFoundError"):
        raised += ": name files that it reads in `files`, and open them beside itself, by Path(__file__).with_name(…)"
    return raised


@contextmanager
def placed(root: Path, config: UserCode) -> Iterator[Path]:
    """Yield the Python file in a folder with only the files of its job."""
    with scratch_folder("check") as folder:
        for file in (config.path, *config.files):
            copy = folder / beside(config.path, file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, copy)
        yield folder / posixpath.basename(config.path)
