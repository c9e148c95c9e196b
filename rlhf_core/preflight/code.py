"""Static checks of the user's Python files: their imports, and whether these are sent with them. Runs no code."""

from __future__ import annotations

import ast
import posixpath
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import rlhf_core
from rlhf_core.config.data.sources import FunctionSource
from rlhf_core.config.environments.environments import CodeEnvironment
from rlhf_core.config.environments.tools import FunctionTool
from rlhf_core.config.rewards.rewards import FunctionReward
from rlhf_core.config.user_code import beside
from rlhf_core.errors import RecipeError
from rlhf_core.system.paths import file_problem

UserCode = FunctionReward | FunctionSource | CodeEnvironment | FunctionTool
LARGEST_FILE = 64 * 1024**2  # bytes


def check_files(config: UserCode, root: Path) -> None:
    """Raise RecipeError unless `files` lists all of the user's files that the code imports, and all can be sent. Runs
    no code.
    """
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


def _check_file(root: Path, file: str, path: str) -> None:
    if problem := file_problem(root / file):
        raise RecipeError(f"{file}, which `files` names beside {path}: {problem}")
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


def _imported_beside(root: Path, path: str, files: Sequence[str]) -> list[str]:
    """Return the files in the folder of `path` that it imports, directly or through others, as paths in the recipe."""
    folder = posixpath.dirname(posixpath.normpath(path))
    files_seen: dict[str, None] = {}
    pending = [posixpath.normpath(path), *(file for file in files if file.endswith(".py"))]
    while pending:
        here = pending.pop()
        package = posixpath.dirname(posixpath.relpath(here, folder or "."))
        for module, is_relative in _imports((root / here).read_bytes(), package):
            if not is_relative and _is_installed(module.partition("/")[0], (root / path).parent):
                continue  # it goes before a file of the user's
            for file in _files_of(root, folder, module):
                if file not in files_seen:
                    files_seen[file] = None
                    pending.append(file)
    return sorted(files_seen.keys() - {posixpath.normpath(path)})


def _imports(source: bytes, package: str) -> Iterator[tuple[str, bool]]:
    """Yield all modules that the text could import, at any place: the path from the folder of imports, without a
    suffix; and whether the import is relative.

    package: the folder of the text, from the folder of imports.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # loading it reports the problem
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
    """Yield the files next to the user's that importing `module` runs: those of its packages, and its own."""
    parts = [part for part in module.split("/") if part != "."]
    if ".." in parts:
        return
    for length in range(1, len(parts) + 1):
        below = posixpath.join(folder, *parts[:length])
        yield from (file for file in (f"{below}.py", f"{below}/__init__.py") if file_problem(root / file) is None)


def _is_installed(name: str, folder: Path) -> bool:
    """Return whether the top-level module `name` is Python's or is installed outside of the user's `folder`."""
    # Not sys.path: folders of other users' code may have been added to it.
    installed = {sysconfig.get_path(scheme) for scheme in ("stdlib", "platstdlib", "purelib", "platlib")}
    project = str(Path(rlhf_core.__file__).parents[1])
    places = [place for place in (*sorted(installed), project) if Path(place).resolve() != folder.resolve()]
    spec = PathFinder.find_spec(name, places)
    return name in sys.stdlib_module_names or (spec is not None and spec.origin is not None)
