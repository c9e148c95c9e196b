"""Ranks that answer questions of a test: forks of one process, which has imported what they need.

`python -m … MODULE SIZE ADDRESS FOLDER ARGUMENTS` runs MODULE's main(rank, ADDRESS, FOLDER, ARGUMENTS) as each rank.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.training.distributed import host_store

Answer = tuple[str, dict[str, Any], dict[str, Tensor]]  # of a rank: numbers and tensors by a name
Answers = tuple[list[dict[str, Any]], dict[str, Tensor]]


def run_ranks(module: str, size: int, folder: Path, *arguments: str) -> Answers:
    """The numbers of all ranks, and the tensors of rank 0."""
    store = host_store("127.0.0.1")
    address = f"127.0.0.1:{store.port}"
    ranks = subprocess.Popen(
        [sys.executable, "-m", "tests.rlhf_core.training.ranks", module, str(size), address, str(folder), *arguments],
        env=os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        errors = ranks.communicate(timeout=500)[1]
    finally:
        if ranks.poll() is None:
            os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, errors
    numbers = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
    return numbers, load_file(folder / "rank0.safetensors")


def of(answers: Answers, name: str) -> dict[str, Tensor]:
    found = {key.removeprefix(f"{name}/"): t for key, t in answers[1].items() if key.startswith(f"{name}/")}
    assert found
    return found


def write_answers(rank: int, folder: Path, answers: Iterator[Answer]) -> None:
    numbers: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, found, state in answers:
        numbers[name] = found
        tensors |= {f"{name}/{key}": value.contiguous() for key, value in state.items()}
    (folder / f"rank{rank}.json").write_text(json.dumps(numbers))
    save_file(tensors, folder / f"rank{rank}.safetensors")


def main(module: str, size: int, address: str, folder: Path, *arguments: str) -> None:
    target = importlib.import_module(module).main
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=target, args=(rank, address, folder, *arguments)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(int(any(rank.exitcode for rank in ranks)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), *sys.argv[5:])
