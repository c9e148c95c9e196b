"""Measurements as JSON: what ran, where, on which commit, and its figures; benchmarks/report.py makes pages of them.

A benchmark stores its measurement in the file that BENCHMARK_RESULT names:
`BENCHMARK_RESULT=benchmarks/results/layouts-float32.json python -m benchmarks.layouts`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

VARIABLE = "BENCHMARK_RESULT"
FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement; null stands for what was not recorded."""

    command: str | None
    seeds: list[int] | None
    machine: str | None
    commit: str | None
    date: str | None
    figures: dict[str, Any]  # numbers, or lists of them: one a seed, or one a precision
    significant: dict[str, list[bool]] = field(default_factory=dict)  # by figure: its 95 % interval excludes no effect
    lab: str | None = None  # page and heading in docs/lab/ that have the whole measurement


def read(name: str) -> Measurement:
    """Return the stored measurement `name`."""
    return Measurement(**json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def write(file: Path, measurement: Measurement) -> None:
    """Write a measurement, each list in one line."""
    text = json.dumps(asdict(measurement), indent=1, ensure_ascii=False)
    file.write_text(re.sub(r"\[\n[^\[\]{}]*\]", _in_one_line, text) + "\n", encoding="utf-8")


def _in_one_line(found: re.Match[str]) -> str:
    return json.dumps(json.loads(found[0]))


def store_figures(
    figures: Mapping[str, Any], *, seeds: Sequence[int] | None = None, command: str | None = None
) -> None:
    """Write the measurement of this process to the file in BENCHMARK_RESULT; without that variable, nothing.

    command: what was measured, if that was not this program.
    """
    if target := os.environ.get(VARIABLE):
        today = datetime.now(UTC).date().isoformat()
        machine = f"{device()}, load average {os.getloadavg()[0]:.1f}"
        known_seeds = None if seeds is None else [*seeds]
        write(Path(target), Measurement(command or _command(), known_seeds, machine, commit(), today, dict(figures)))


def _command() -> str:
    spec = sys.modules["__main__"].__spec__
    program = sys.argv[:1] if spec is None else ["-m", spec.name]
    return shlex.join(["python", *program, *sys.argv[1:]])


def device() -> str:
    """Return the name of the GPU, or of the processor with its number of cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line.split(": ")[1] for line in cpuinfo if "model name" in line), platform.processor())
    return f"{os.cpu_count()} cores of {processor}"


def commit() -> str | None:
    """Return the commit of this checkout, with `-dirty` after changes; None outside of one."""
    command = ["git", "-C", str(FOLDER.parent), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
