"""A fork of the warm process: runs a Python command line as a fresh interpreter would."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rlhf_core.warm.preloading import forget_our_modules


@dataclass(frozen=True, slots=True)
class Program:
    arguments: list[str]  # of `python`: a script's path or `-m MODULE`, and further arguments
    folder: str
    environment: dict[str, str]
    umask: int
    descriptors: list[int]  # standard input, output, error


def run(program: Program, base_path: Sequence[str], our_files: Mapping[str, int]) -> None:
    """Run a command line as a fresh interpreter does.

    base_path: sys.path without the entries of PYTHONPATH. our_files: of our code, as of its import.
    """
    for target, descriptor in enumerate(program.descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(program.folder)
    os.umask(program.umask)
    os.environ.clear()
    os.environ.update(program.environment)
    if program.environment.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]  # both are text
    _take_over_state()
    python_path = [path for path in program.environment.get("PYTHONPATH", "").split(":") if path]
    first, *others = program.arguments
    is_module = first == "-m"
    sys.argv = others if is_module else program.arguments
    sys.path[:] = [program.folder if is_module else str(Path(first).resolve().parent), *python_path, *base_path]
    forget_our_modules(our_files)
    if is_module:
        sys.modules.pop(others[0], None)  # it runs as `__main__`, and runpy warns of a second one
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


def _take_over_state() -> None:
    """Reset the state that libraries keep per process."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # the global generator, which is as random in a fresh process
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
        constants.HF_HUB_OFFLINE = offline.upper() in constants.ENV_VARS_TRUE_VALUES  # type: ignore[attr-defined]


def exit_after(program: Callable[[], None]) -> NoReturn:
    """Run the program and exit like an interpreter, without its teardown of modules, which takes as long as a stage."""
    status = 1
    try:
        program()
        status = 0
    except SystemExit as ended:
        if not (ended.code is None or isinstance(ended.code, int)):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as multiprocessing's forks do
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status & 0xFF)
