"""What a fork of the warm process does: run a command line of Python as a fresh interpreter would."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True, slots=True)
class Request:
    arguments: list[str]  # of `python`: a script's path or `-m MODULE`, and what follows
    folder: str
    environment: dict[str, str]
    umask: int
    descriptors: list[int]  # standard input, output, error


def run(request: Request, base_path: Sequence[str]) -> None:
    """What a fresh interpreter does with its command line. base_path: sys.path without what PYTHONPATH adds."""
    for target, descriptor in enumerate(request.descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request.folder)
    os.umask(request.umask)
    os.environ.clear()
    os.environ.update(request.environment)
    if request.environment.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]  # both are text
    for name in [name for name in sys.modules if name.split(".")[0] == "rlhf_core"]:
        del sys.modules[name]
    _take_over_state()
    python_path = [path for path in request.environment.get("PYTHONPATH", "").split(":") if path]
    first, *others = request.arguments
    if first == "-m":
        module, *others = others
        sys.argv = [module, *others]
        sys.path[:] = [request.folder, *python_path, *base_path]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *others]
        sys.path[:] = [str(Path(first).resolve().parent), *python_path, *base_path]
        runpy.run_path(first, run_name="__main__")


def _take_over_state() -> None:
    """What libraries keep of a process: each fork has its own."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # the global generator, which is as random in a fresh process
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
        constants.HF_HUB_OFFLINE = offline.upper() in constants.ENV_VARS_TRUE_VALUES  # type: ignore[attr-defined]


def exit_after(program: Callable[[], None]) -> NoReturn:
    """What an interpreter does at its end, but for taking all those modules apart, which takes as long as a stage."""
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
