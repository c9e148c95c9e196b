"""The user's Python files before a job: what they define and import, and that they load, in a process of their own."""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

import rlhf_core
from rlhf_core.artifacts.scratch import scratch_folder
from rlhf_core.config.data import FunctionSource
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.config.user_code import beside
from rlhf_core.data.user_code import check_function
from rlhf_core.errors import RecipeError, RewardError
from rlhf_core.rewards.function import PARAMETERS
from rlhf_core.rewards.user_process import UserFunction, UserProcess

LOADING_SECONDS = 60.0
LARGEST_FILE = 64 * 1024**2  # bytes
_ENDED = re.compile(r"its process ended with exit code (-?\d+)")
_GROUP_MARGIN = re.compile(r"^ *[|+] ?-?\+?")  # of each line of an ExceptionGroup's traceback
_SHOWN = 300  # characters of an exception
_MODULE_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_NOT_WITH_AN_ORCHESTRATOR = ("torch", "vllm", "deepspeed", "peft", "accelerate")  # see pyproject.toml


def check_code(config: FunctionReward | FunctionSource, root: Path) -> None:
    """Load the file as its job will: with the files that `files` names, and no others, beside it.

    Raises RecipeError. Loads it in a process that is killed after LOADING_SECONDS.
    """
    check_function(root / config.path, config.function, config.path)
    for file in config.files:
        _check_file(root, file, config.path)
    named = {posixpath.normpath(file) for file in config.files}
    missing = [file for file in _imported_beside(root, config.path, config.files) if file not in named]
    if missing:
        names = ", ".join([*config.files, *missing])
        raise RecipeError(
            f"{config.path} imports {missing[0]}, which lies next to it but would not be sent with it: "
            f"add `files: [{names}]`"
        )
    with _placed(root, config) as placed:
        _load(config, placed)


def _check_file(root: Path, file: str, path: str) -> None:
    if not (root / file).is_file():
        what = "is a folder: name the files in it" if (root / file).is_dir() else "there is no such file"
        raise RecipeError(f"{file}, which `files` names beside {path}: {what}")
    if not (root / file).resolve().is_relative_to((root / path).resolve().parent):
        raise RecipeError(f"{file}, which `files` names beside {path}, is a link to a file outside of its folder")
    size = (root / file).stat().st_size
    if size > LARGEST_FILE:
        raise RecipeError(
            f"{file}, which `files` names beside {path}, has {size / 1024**2:.0f} MiB, more than the "
            f"{LARGEST_FILE // 1024**2} that travel with code: have it read from where it is, or make it a dataset"
        )
    name = beside(path, file).partition("/")[0].removesuffix(".py")
    if file.endswith(".py") and _is_installed(name, (root / path).parent):
        raise RecipeError(f"{file}, which `files` names beside {path}, has the name of an installed module: rename it")


def _load(config: FunctionReward | FunctionSource, file: Path) -> None:
    parameters = PARAMETERS if isinstance(config, FunctionReward) else ()
    function = UserFunction(file, config.function, config.path, parameters, config.options)
    process = UserProcess(function, LOADING_SECONDS)
    try:
        process.start()
    except RewardError as error:
        text = str(error)
        missing = _MODULE_MISSING.search(text)
        if missing is None:
            raise RecipeError(_why(text, file, config.path)) from error
        if missing[1].partition(".")[0] not in _NOT_WITH_AN_ORCHESTRATOR:
            raise RecipeError(
                f"{config.path} imports `{missing[1]}`, which is not installed here: install it, here and on the "
                "cluster's nodes, or name it in `files` if it is a file of yours"
            ) from error
    finally:
        process.close()


def _why(text: str, file: Path, path: str) -> str:
    """One sentence of the error of a process that has not loaded `file`."""
    if ended := _ENDED.search(text):
        return f"{path} cannot be loaded: it ends its process (exit code {ended[1]}; -11: a crash in compiled code)"
    found = list(re.finditer(rf'File "{re.escape(str(file.parent))}/([^"]+)", line (\d+)', text))
    if found:
        where = posixpath.join(posixpath.dirname(path), found[-1][1])
        return f"{path} cannot be loaded: {where}, line {found[-1][2]}: {_raised(text)}"
    return f"{text}; load what takes long at the first call" if "within" in text else text.rpartition("raised:\n")[2]


def _raised(text: str) -> str:
    """Type and message of the exception in a traceback, in one line."""
    last = text.rpartition("Traceback (most recent call last):")[2]
    lines = [_GROUP_MARGIN.sub("", line) for line in last.splitlines()[1:]]
    said = " ".join(" ".join(line for line in lines if not line.startswith(("  ", "-"))).split())
    hint = ": name files that it reads beside itself in `files`" if said.startswith("FileNotFoundError") else ""
    return (said if len(said) <= _SHOWN else f"{said[:_SHOWN]}…") + hint


@contextmanager
def _placed(root: Path, config: FunctionReward | FunctionSource) -> Iterator[Path]:
    """The Python file in a folder that has only what its job has."""
    with scratch_folder("check") as folder:
        for file in (config.path, *config.files):
            copy = folder / beside(config.path, file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, copy)
        yield folder / posixpath.basename(config.path)


def _imported_beside(root: Path, path: str, files: Sequence[str]) -> list[str]:
    """The files in the folder of `path` that it imports, itself or through others, as the recipe would name them."""
    folder = posixpath.dirname(posixpath.normpath(path))
    found: dict[str, None] = {}
    pending = [posixpath.normpath(path), *(file for file in files if file.endswith(".py"))]
    while pending:
        here = pending.pop()
        package = posixpath.dirname(posixpath.relpath(here, folder or "."))
        for module, is_relative in _imports((root / here).read_bytes(), package):
            if not is_relative and _is_installed(module.partition("/")[0], root / folder):
                continue  # it goes before a file of the user's
            for file in _files_of(root, folder, module):
                if file not in found:
                    found[file] = None
                    pending.append(file)
    return sorted(found.keys() - {posixpath.normpath(path)})


def _imports(source: bytes, package: str) -> Iterator[tuple[str, bool]]:
    """All modules that the text could import, at any place: the path from the folder of imports, without a suffix; and
    whether the import is relative.

    package: the folder of the text, from the folder of imports.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # loading it says what is wrong
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.replace(".", "/"), False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = posixpath.join(package, *[".."] * (node.level - 1)) if node.level else ""
            module = posixpath.join(start, (node.module or "").replace(".", "/"))
            for name in ("", *(alias.name for alias in node.names)):
                yield posixpath.normpath(posixpath.join(module, name)), node.level > 0


def _files_of(root: Path, folder: str, module: str) -> Iterator[str]:
    """The files next to the user's that importing `module` runs: those of its packages, and its own."""
    parts = [part for part in module.split("/") if part != "."]
    if ".." in parts:
        return
    for length in range(1, len(parts) + 1):
        below = posixpath.join(folder, *parts[:length])
        yield from (file for file in (f"{below}.py", f"{below}/__init__.py") if (root / file).is_file())


def _is_installed(name: str, folder: Path) -> bool:
    """Whether the top-level module `name` is Python's or is installed; found anywhere but in the user's `folder`."""
    # Not sys.path: folders of other users' code may have been added to it.
    installed = {sysconfig.get_path(scheme) for scheme in ("stdlib", "platstdlib", "purelib", "platlib")}
    ours = str(Path(rlhf_core.__file__).parents[1])
    places = [place for place in (*sorted(installed), ours) if Path(place).resolve() != folder.resolve()]
    found = PathFinder.find_spec(name, places)
    return name in sys.stdlib_module_names or (found is not None and found.origin is not None)
