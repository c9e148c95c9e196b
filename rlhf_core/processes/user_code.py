"""Functions in the user's Python files: checked without execution, loaded with errors that name file and line."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import inspect
import os
import posixpath
import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rlhf_core.errors import RecipeError, StageError, did_you_mean, shortened, without_addresses
from rlhf_core.system.paths import file_problem

# Called with a batch; makes rows; made for each episode; called by the policy; plays an episode.
CodeKind = Literal["function", "source", "environment", "tool", "program"]

_SHOWN = 200  # characters
_SHOWN_OF_ERRORS = 300  # characters
# Code that calls the user's: its lines say nothing about an error in theirs.
_CALLERS = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(asyncio.__file__).parent}{os.sep}")
_copies: dict[
    str, str
] = {}  # folder of code that was run here -> the folder of which it is a copy, as the recipe writes it


def check_function(file: Path, function: str, shown: str) -> None:
    """Raise RecipeError if `file` cannot be read, is not Python, or does not define `function`. Executes nothing.

    shown: the path as the recipe writes it, for messages.
    """
    names = _defined_names(_parse(file, shown))
    if "*" in names or function in names:
        return
    nearest = did_you_mean(function, sorted(names))
    defined = f"; it defines {shortened(', '.join(sorted(names)), _SHOWN)}" if names else "; it defines nothing"
    raise RecipeError(f"{shown}: there is no function `{function}` in this file{nearest}{defined}")


def load_function(file: Path, function: str, shown: str) -> Callable[..., Any]:
    """Return `function` of the Python file, which is run once. Modules next to it can be imported, also by `from .
    import x`.

    Raises RecipeError as `check_function` does, and StageError with the traceback if running the file raises.
    """
    check_function(file, function, shown)
    return function_of(run_file(file, shown), function, shown)


def run_file(file: Path, shown: str) -> ModuleType:
    """Import the Python file as a module. Raises StageError with the traceback if running it raises."""
    module = _module(file)
    _copies[f"{file.parent}{os.sep}"] = _folder(shown)
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)  # noqa: S102  running it is what this is for
    except SystemExit as error:
        raise StageError(f"{shown}: loading this file ended the process: it calls `sys.exit`") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything; it is shown to them as it is
        raise StageError(f"{shown}: loading this file failed: {user_error(error)}") from error
    return module


def function_of(module: ModuleType, function: str, shown: str) -> Callable[..., Any]:
    """Return the module's function. Raises RecipeError if it is not callable."""
    loaded = getattr(module, function, None)
    if not callable(loaded):
        raise RecipeError(f"{shown}: `{function}` is not a function")
    return loaded  # type: ignore[no-any-return]


def user_error(error: BaseException) -> str:
    """Format an exception of the user's code for the end of a sentence: type and message first, then the traceback."""
    user_frame = error.__traceback__
    while user_frame is not None and user_frame.tb_frame.f_code.co_filename.startswith(_CALLERS):
        user_frame = user_frame.tb_next
    shown = traceback.format_exception(type(error), error, user_frame or error.__traceback__)
    text = without_addresses("\n".join([shortened(_one_line(error), _SHOWN_OF_ERRORS), "".join(shown).rstrip()]))
    for copy, original in _copies.items():
        text = text.replace(copy, original)
    return text


def last_place(traceback: str, shown: str, folder: Path) -> str:
    """Return `file, line number` of the traceback's last frame in one of the user's files; empty if there is none.

    shown: one of them as the recipe writes it. folder: its real folder, with the other files.
    """
    prefix = _folder(shown)
    frames = re.findall(rf'File "{re.escape(prefix)}([^"]+)", line (\d+)', traceback)
    user_frames = [(name, line) for name, line in frames if not name.startswith("/") and (folder / name).is_file()]
    return f"{prefix}{user_frames[-1][0]}, line {user_frames[-1][1]}" if user_frames else ""


def _folder(shown: str) -> str:
    folder = posixpath.dirname(posixpath.normpath(shown))
    return f"{folder}/" if folder.strip("/") else folder


def _one_line(error: BaseException) -> str:
    """Return type and message in one line; for an ExceptionGroup also those of its exceptions."""
    lines = traceback.format_exception_only(error)  # of a SyntaxError also its place, indented
    summary = " ".join("".join(line for line in lines if not line.startswith("  ")).split())
    held = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return " ".join([summary, *map(_one_line, held)])


def check_maker(make: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    """Raise RecipeError unless `make(**options)` can be called and, for a class, has `step(reply)`."""
    try:
        inspect.signature(make).bind(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{name} must take its options {sorted(options)}, by these names: {why_unfit(error)}"
        ) from error
    _require_result(make, name, "an environment")
    if not isinstance(make, type):
        return  # its result's type is known only after a call
    if not hasattr(make, "step"):
        raise RecipeError(f"{name} has no method `step`: write `def step(self, reply)`")
    if inspect.isabstract(make) or getattr(make, "_is_protocol", False):
        raise RecipeError(f"{name} is abstract, and no object of it can be made: name a class that has all its methods")
    if inspect.iscoroutinefunction(make.__init__):  # type: ignore[misc]  # of whatever class it is
        raise RecipeError(f"{name}.__init__ is `async`, so no object can be made: begin what takes long in `reset`")
    for method in ("reset", "step"):
        if hasattr(make, method):
            _check_method(make, method, f"{name}.{method}")


def why_unfit(error: Exception) -> str:
    """Return why arguments do not fit a function's signature, from the error of `inspect`."""
    return str(error).replace("got an unexpected keyword argument", "it takes no argument")


def _check_method(make: type, method: str, name: str) -> None:
    function, declared = getattr(make, method), inspect.getattr_static(make, method)
    if not callable(function):
        raise RecipeError(f"{name} is not a method: write `def {method}(self, …)`")
    of_object = () if isinstance(declared, staticmethod | classmethod) else (None,)
    try:
        inspect.signature(function).bind(*of_object, None)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{name} must take one argument beside `self`: {error}") from error
    _require_result(function, name, "what it answers", may_be_async=True)


def _require_result(function: Callable[..., Any], name: str, what: str, *, may_be_async: bool = False) -> None:
    """Raise RecipeError for a generator function, or for a coroutine function that would not be awaited."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RecipeError(f"{name} yields: it must return {what}")
    if inspect.iscoroutinefunction(function) and not may_be_async:
        raise RecipeError(f"{name} is `async`: it must return {what} itself; begin what takes long in `reset`")


def check_no_threads(ours: Collection[threading.Thread], shown: str) -> None:
    """Raise RecipeError if loading the file has started threads beyond `ours`."""
    if others := [thread.name for thread in threading.enumerate() if thread not in ours]:
        raise RecipeError(
            f"{shown}: loading this file starts a thread ({others[0]}), which an episode's process would not have: "
            "start it in `reset`"
        )


def _module(file: Path) -> ModuleType:
    """Return an empty module for `file`, in a package of the file's folder, which is searched for imports.

    It is searched last: a file called `types.py` must not shadow Python's own.
    """
    package = ModuleType(f"user_code_{hashlib.sha256(str(file.parent).encode()).hexdigest()[:16]}")
    package.__path__ = [str(file.parent)]
    module = ModuleType(f"{package.__name__}.{file.stem}")
    module.__file__, module.__package__ = str(file), package.__name__
    # Dataclasses and pickle look a class's module up there.
    sys.modules |= {package.__name__: package, module.__name__: module}
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    return module


def _parse(file: Path, shown: str) -> ast.Module:
    problem = file_problem(file)
    if problem:
        raise RecipeError(f"{shown}: {problem}")
    try:
        return ast.parse(file.read_bytes(), str(file))
    except OSError as error:
        raise RecipeError(f"{shown}: cannot be read ({error.strerror})") from error
    except SyntaxError as error:
        if not error.lineno:  # an unknown encoding, null bytes
            raise RecipeError(f"{shown}: is not a Python file ({error.msg}): save it as UTF-8") from error
        code = f": {shortened(error.text.strip(), _SHOWN)}" if error.text else ""
        raise RecipeError(
            f"{shown}: syntax error in line {error.lineno}: {shortened(error.msg, _SHOWN)}{code}"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; thousands of brackets
        raise RecipeError(f"{shown}: is not a Python file ({error})") from error


def _defined_names(module: ast.Module) -> set[str]:
    """Return the names that the file binds at its top level, also within if and try; "*" stands for a star import."""
    names: set[str] = set()
    pending: list[ast.AST] = list(module.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            pending += ast.iter_child_nodes(node)
    return names
