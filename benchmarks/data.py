"""Cost of checking a large dataset: `python -m benchmarks.data [ROWS]`, by default a million of 500 characters.

One text in 20 is an earlier one with one word changed; 1000 prompts are excluded, none of which occurs. Every case is
a process of its own that runs the dataset stage as shipped, and loads no torch. With `--datasketch ROWS` that library
searches for the same near-duplicates (pip install datasketch), for comparison.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import store_figures
from benchmarks.stage_alone import stage_input
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.data.reading import write_dataset
from rlhf_core.stages.dataset import run

ROWS, CHARACTERS, HELD_OUT = 1_000_000, 500, 1000
FILE = "texts.jsonl"
CASES: dict[str, dict[str, Any]] = {
    "read, drop duplicates, compare with excluded prompts": {"near_duplicates": "off"},
    "and count near-duplicates": {"near_duplicates": "count"},
    "or drop them": {"near_duplicates": "drop"},
}


class FolderContext:
    """The part of contract.StageContext that the dataset stage uses."""

    name, seed = "data.benchmark", 0

    def __init__(self, root: Path, workdir: Path) -> None:
        self._root, self.workdir = root, workdir

    def user_file(self, path: str) -> Path:
        return self._root / path

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def progress(self, step: int, total: int, phase: str = "", **metrics: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Result:
    seconds: float
    processor_seconds: float
    memory: int  # bytes: peak resident memory
    metrics: dict[str, int]


def texts(count: int) -> Iterator[str]:
    """Yield `count` texts of at most 500 characters, words drawn by Zipf's law; reproducible."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(30_000)]
    weights = list(accumulate(1 / (rank + 10) for rank in range(len(words))))
    earlier: list[str] = []
    for index in range(count):
        if index % 20 == 19:
            changed = draw.choice(earlier).split()
            changed[draw.randrange(len(changed))] = draw.choice(words)
            yield " ".join(changed)
            continue
        text = " ".join(draw.choices(words, cum_weights=weights, k=100))[:CHARACTERS]
        if len(earlier) < 10_000:
            earlier.append(text)
        yield text


def write_inputs(root: Path, rows: int) -> None:
    """Write the file of texts, and the held-out dataset's folder."""
    with (root / FILE).open("w") as file:
        for text in texts(rows):
            file.write(json.dumps({"text": text}) + "\n")
    draw = random.Random(1)
    questions = (" ".join(f"word{draw.randrange(10**6)}" for _ in range(draw.randint(3, 30))) for _ in range(HELD_OUT))
    prompts = [{"id": str(i), "prompt": [{"role": "user", "content": text}]} for i, text in enumerate(questions)]
    write_dataset(root / "held_out", prompts, {"format": "prompts"})


def measure(root: Path, case: str) -> Result:
    """Run the case in this process."""
    source = {"type": "files", "paths": [FILE]}
    settings = {"format": "text", "source": source, **CASES[case]}
    inputs = {"exclude.test": stage_input(root / "held_out", Kind.DATASET)}
    with tempfile.TemporaryDirectory(dir=root) as workdir:
        started = time.perf_counter()
        context: Any = FolderContext(root, Path(workdir))
        output = run(DatasetConfig.model_validate_json(json.dumps(settings)), inputs, context)
        seconds = time.perf_counter() - started
    memory = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    metrics = {name: value for name, value in output.metrics.items() if isinstance(value, int)}
    return Result(seconds, time.process_time(), int(memory.split()[1]) * 1024, metrics)


def datasketch_seconds(rows: int) -> tuple[float, int]:
    """Return datasketch's processor seconds for sketches and queries of `rows` texts, and its near-duplicates."""
    from datasketch import MinHash, MinHashLSH  # type: ignore[import-not-found]  # only who compares installs it

    duplicates, index = 0, MinHashLSH(threshold=0.8, num_perm=128, params=(16, 8))
    all_texts = list(texts(rows))
    started = time.process_time()
    for number, text in enumerate(all_texts):
        words = text.split()
        minhash = MinHash(num_perm=128)
        minhash.update_batch([" ".join(words[start : start + 5]).encode() for start in range(max(len(words) - 4, 1))])
        if index.query(minhash):
            duplicates += 1
        else:
            index.insert(number, minhash)
    return time.process_time() - started, duplicates


def in_own_process(root: Path, case: str) -> Result:
    command = [sys.executable, "-m", "benchmarks.data", "--case", str(root), case]
    return Result(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def main(arguments: list[str]) -> None:
    console = Console(width=140)
    match arguments:
        case ["--case", root, case]:
            print(json.dumps(asdict(measure(Path(root), case))))
        case ["--datasketch", rows]:
            seconds, duplicates = datasketch_seconds(int(rows))
            console.print(f"{rows} rows: {seconds:.1f} CPU s, {duplicates} near-duplicates")
        case _:
            count = int(arguments[0]) if arguments else ROWS
            table = Table("case", "s", "CPU s", "peak memory, MiB", "metrics")
            figures: dict[str, Any] = {"rows": count}
            with tempfile.TemporaryDirectory() as folder:
                write_inputs(Path(folder), count)
                for name in CASES:
                    result = in_own_process(Path(folder), name)
                    figures[name] = {
                        "seconds": result.seconds, "processor_seconds": result.processor_seconds,
                        "memory_mib": result.memory / 2**20,
                    }  # fmt: skip
                    table.add_row(
                        name, f"{result.seconds:.0f}", f"{result.processor_seconds:.0f}",
                        f"{result.memory / 2**20:.0f}", str(result.metrics),
                    )  # fmt: skip
            console.print(f"{count} rows; load average {os.getloadavg()[0]:.1f}", table)
            store_figures(figures)


if __name__ == "__main__":
    main(sys.argv[1:])
