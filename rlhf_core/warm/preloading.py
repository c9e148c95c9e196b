"""What the warm process imports, for all of its forks."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.rollout.vllm_environment import set_vllm_environment

# What the jobs, ranks and engines of the shipped stages import, by what takes the time.
LIBRARIES = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "peft",
    "deepspeed",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "s3fs",
    "wandb",
    "tensorboard.summary.writer.event_file_writer",
    "reasoning_gym",
    "datasets",
)


def preload(libraries: Sequence[str] = LIBRARIES) -> None:
    """Import `libraries`, those that are installed. Raises RuntimeError if one has started a thread."""
    set_vllm_environment()
    # Else OpenMP and BLAS start threads at their import. Whoever computes in a fork sets its own number.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of Arrow's allocator
    # Ray reads the variables of the worker that it is in when it is first imported: each fork does that itself.
    sys.modules["ray"] = None  # type: ignore[assignment]
    for library in libraries:
        try:
            importlib.import_module(library)
        except ImportError as error:
            print(f"not preloaded: {library} ({error})", flush=True)
    del sys.modules["ray"]
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise RuntimeError(f"{threads - 1} threads were started by what was imported: a fork would lack them")
    gc.collect()
    gc.freeze()  # else the collector of every fork walks over all that, and copies its memory
