"""The environment in which vLLM is imported. Imports no library."""

import os
import tempfile
from functools import cache

from rlhf_core.system.scratch import new_folder

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a second process costs 20 s of start on two cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default an engine uses all cores but one; here it shares them
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def set_vllm_environment() -> None:
    """Set the variables that vLLM reads at import. Must be called before importing it."""
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # errors are raised too; the log of one has a hundred pages


@cache
def take_temporary_folder() -> None:
    """Set a scratch folder as Python's temporary folder in a process of engines, once: vLLM leaves files there."""
    # vLLM's sockets stay in the previous folder: their paths must be short.
    os.environ.setdefault("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
    tempfile.tempdir = str(new_folder("engine"))
