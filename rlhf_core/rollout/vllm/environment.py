"""The environment that vLLM is imported in. Imports no library."""

import os
import tempfile
from functools import cache

from rlhf_core.system.scratch import new_folder

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a second process costs 20 s of start on two cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default an engine takes all cores but one; here it shares them
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def set_vllm_environment() -> None:
    """Before vLLM is imported: it reads its variables then."""
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # an error is raised too; its dump has a hundred pages


@cache
def take_temporary_folder() -> None:
    """Give a process of engines a scratch folder as Python's temporary folder, once: vLLM leaves files there."""
    # Its sockets stay where they were: their paths must be short.
    os.environ.setdefault("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
    tempfile.tempdir = str(new_folder("engine"))
