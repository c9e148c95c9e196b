"""Imports of the warm process, shared by all of its forks: libraries, and our own code.

A program runs our code as of its start. So a fork keeps the imported modules only if it would find the same files,
unchanged; else it imports all of them again.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name

import rlhf_core
from rlhf_core.config.engines.rollout import ENGINES
from rlhf_core.config.plugins import installed

# Imports of the shipped stages' jobs, ranks and engines that take most of the time. `.*`: all modules below.
LIBRARIES = (
    # What `wandb.init` imports. First: Pydantic looks for each of its classes among all modules, 2 s with all of these.
    "wandb.sdk.launch.inputs.internal",
    "torch",
    "transformers.models.llama.modeling_llama",
    "peft",
    "deepspeed",
    *(module for entry in ENGINES.values() for module in entry.warm_modules),
    "s3fs",
    "tensorboard.summary.writer.event_file_writer",
    "reasoning_gym",
    "datasets",
    "rlhf_core.*",
)


def preload(libraries: Sequence[str] = LIBRARIES) -> None:
    """Import `libraries`, those that are installed.

    Raises RuntimeError if one has started a thread or set a resource limit, which all forks would inherit.
    """
    limits = _limits()
    for entry in ENGINES.values():
        resolve_name(entry.environment)()
    # Else OpenMP and BLAS start threads at their import. Whoever computes in a fork sets its own number.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of Arrow's allocator
    # Ray reads the variables of the worker that it is in when it is first imported: each fork does that itself.
    sys.modules["ray"] = None  # type: ignore[assignment]
    for module in (module for library in libraries for module in _modules(library)):
        try:
            importlib.import_module(module)
        except (ImportError, SyntaxError) as error:
            print(f"not preloaded: {module} ({error})", flush=True)
    del sys.modules["ray"]
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise RuntimeError(f"{threads - 1} threads were started by what was imported: a fork would lack them")
    if changed := [name for name, limit in _limits().items() if limit != limits[name]]:
        raise RuntimeError(f"{changed[0]} was set by what was imported: all jobs would inherit it")
    gc.collect()
    gc.freeze()  # else the collector of every fork walks over all that, and copies its memory


def _limits() -> dict[str, tuple[int, int]]:
    names = [name for name in vars(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def _modules(library: str) -> Iterator[str]:
    if not library.endswith(".*"):
        yield library
        return
    package = importlib.import_module(library.removesuffix(".*"))
    for module_info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module_info.name.endswith("__main__"):
            yield module_info.name


def our_files() -> dict[str, int]:
    """Return path -> modification time of each file of our code that this process would import."""
    changed = {}
    for path in Path(rlhf_core.__file__).parent.rglob("*.py"):
        with suppress(FileNotFoundError):  # it is being replaced, or is an editor's link to nowhere
            changed[str(path)] = path.stat().st_mtime_ns
    return changed


def forget_our_modules(files: Mapping[str, int]) -> None:
    """Drop our modules and those of plugins unless `sys.path` leads to the same files, unchanged since `files`."""
    specs = (finder.find_spec("rlhf_core", None) for finder in sys.meta_path)
    origin = next((spec.origin for spec in specs if spec is not None), None)
    if origin == rlhf_core.__file__ and our_files() == files:
        return
    # A plugin's lines of tables are objects of our classes, which are about to be others.
    tops = {point.module.split(".")[0] for points in installed().values() for _, point in points} | {"rlhf_core"}
    for name in [name for name in sys.modules if name.split(".")[0] in tops]:
        del sys.modules[name]
