"""Ranks that answer questions of a test, as forks of a process that has imported DeepSpeed."""

from __future__ import annotations

import importlib
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.training.distributed import host_store
from tests.forked_children import FORKS

SECONDS = 500.0

Answer = tuple[str, dict[str, Any], dict[str, Tensor]]  # of a rank: numbers and tensors by a name
Answers = tuple[list[dict[str, Any]], dict[str, Tensor]]


def run_ranks(module: str, size: int, folder: Path, *arguments: str) -> Answers:
    """Call MODULE's main(rank, address, folder, *arguments) as each rank.

    Return the numbers of all ranks, and the tensors of rank 0.
    """
    store = host_store("127.0.0.1")
    address = f"127.0.0.1:{store.port}"
    ranks = [FORKS.Process(target=_run, args=(module, rank, address, folder, arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + SECONDS
    try:
        for process in ranks:
            process.join(max(deadline - time.monotonic(), 0))
        errors = [path.read_text() for path in sorted(folder.glob("rank*.error"))]
        assert [process.exitcode for process in ranks] == [0] * size, "\n".join(errors)
    finally:
        for process in ranks:
            process.kill()
    numbers = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
    return numbers, load_file(folder / "rank0.safetensors")


def _run(module: str, rank: int, address: str, folder: Path, arguments: tuple[str, ...]) -> None:
    try:
        importlib.import_module(module).main(rank, address, folder, *arguments)
    except BaseException:
        (folder / f"rank{rank}.error").write_text(traceback.format_exc())
        raise


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
