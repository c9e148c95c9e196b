"""Common part of the benchmarks against TRL: the sides alternate in processes of their own; a table has their medians.

The first steps of each process are not counted. TRL comes with
`pip install -e .[bench]`, or is put beside this environment: `pip install --target FOLDER --no-deps trl==1.16.0`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.process_memory import ProcessWatch, busy_seconds
from benchmarks.record import store_figures
from benchmarks.word_models import SHAPES, make_model
from benchmarks.workload import COMPILED, SELECTIVE, Result, Workload

OURS = ("ours", COMPILED, SELECTIVE)
# Sides by precision; those of TRL are the paths of trl_trainers.
SIDES = {
    "float32": (*OURS, "trl", "trl-jemalloc"),
    "bfloat16": (*OURS, "trl", "trl-jemalloc", "trl-bf16-weights"),
}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Description of one benchmark."""

    name: str  # of its module in benchmarks
    description: str
    workload: Callable[..., Workload]
    options: Mapping[str, str]  # settings of the workload, with descriptions
    modules: tuple[str, str]  # of our side and of TRL's, in benchmarks
    unit: str  # the counted unit
    aim: float  # ours to the best of TRL's
    phases: tuple[str, ...] = ()
    make_model: Callable[[Any, Path], int] = lambda workload, folder: make_model(workload.shape, folder)
    # How far a loss may be from that of another side, by precision: a share of it. None given: they are not compared.
    loss_tolerance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of one process."""

    size: str
    dtype: str
    side: str
    result: Result
    peak: int  # bytes
    at_peak: dict[str, int]  # bytes of each program then
    others: float  # share of the machine that other programs used during the counted steps

    @property
    def throughput(self) -> float:
        """Counted units per second."""
        steps = self.result.steps
        return sum(step.amount for step in steps) / sum(step.seconds for step in steps)

    @property
    def step(self) -> float:
        """Mean seconds of a step."""
        return statistics.mean(step.seconds for step in self.result.steps)

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(self.result.steps[0].phases)

    def seconds(self, phase: str) -> float:
        """Return the mean seconds of a phase per step."""
        return statistics.mean(step.phases[phase] for step in self.result.steps)


@dataclass(frozen=True, slots=True)
class Row:
    """All measurements of one side at one size and precision."""

    size: str
    dtype: str
    side: str
    throughput: tuple[float, float, float]  # least, median, most
    peak: int
    phases: dict[str, float]  # medians, seconds a step
    step: float  # median, seconds
    ratio: float | None  # to the best of TRL's paths; None for TRL's own rows


def summarise(measurements: Sequence[Measurement]) -> list[Row]:
    """Return one row per side, in order of appearance."""
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for each in measurements:
        groups.setdefault((each.size, each.dtype, each.side), []).append(each)
    medians = {key: statistics.median(each.throughput for each in group) for key, group in groups.items()}
    return [_row(key, group, medians) for key, group in groups.items()]


def _row(key: tuple[str, str, str], group: Sequence[Measurement], medians: dict[tuple[str, str, str], float]) -> Row:
    size, dtype, side = key
    peers = [median for other, median in medians.items() if other[:2] == key[:2] and other[2] not in OURS]
    throughputs = [each.throughput for each in group]
    return Row(
        size, dtype, side,
        throughput=(min(throughputs), medians[key], max(throughputs)),
        peak=max(each.peak for each in group),
        phases={name: statistics.median(each.seconds(name) for each in group) for name in group[0].phases},
        step=statistics.median(each.step for each in group),
        ratio=medians[key] / max(peers) if side in OURS and peers else None,
    )  # fmt: skip


def table(benchmark: Benchmark, rows: Sequence[Row]) -> Table:
    shown = Table(
        title=benchmark.description,
        caption=f"seconds are medians of one step; ratio: ours to the best of TRL's, the aim at 25m is {benchmark.aim}",
    )
    for column in ("model", "dtype", "side"):
        shown.add_column(column)
    for column in (f"{benchmark.unit}/s", "least-most", "memory MiB", *benchmark.phases, "step", "ratio"):
        shown.add_column(column, justify="right")
    previous = None
    for row in rows:
        if previous not in (None, (row.size, row.dtype)):
            shown.add_section()
        previous = (row.size, row.dtype)
        least, median, most = (f"{value:.4g}" for value in row.throughput)
        shown.add_row(
            row.size, row.dtype, row.side, median, f"{least}-{most}", f"{row.peak / 2**20:.0f}",
            *(f"{row.phases[name]:.2f}" for name in benchmark.phases), f"{row.step:.2f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
        )  # fmt: skip
    return shown


def figures(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return throughput, memory and ratios by size and side, lists with a value a precision."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        side = found.setdefault(row.size, {}).setdefault(row.side, {})
        side.setdefault("throughput", []).append(row.throughput[1])
        side.setdefault("memory_mib", []).append(row.peak / 2**20)
        alike = [each for each in rows if (each.size, each.dtype) == (row.size, row.dtype) and each.side not in OURS]
        if row.side in OURS and alike:
            fastest = max(alike, key=lambda each: each.throughput[1])
            side.setdefault("memory_of_trl", []).append(row.peak / fastest.peak)
            if row.side == "ours":
                found[row.size].setdefault("of_trl", []).append(row.ratio)
    return found


def different_work(benchmark: Benchmark, measurements: Sequence[Measurement]) -> str | None:
    """Describe how the last measurement's work differs from the first one's of its size and precision; or None."""
    *_, last = measurements
    first = next(each for each in measurements if (each.size, each.dtype) == (last.size, last.dtype))
    one, other = first.result, last.result
    tolerance = benchmark.loss_tolerance.get(last.dtype, math.inf)
    losses = zip(one.losses, other.losses, strict=True)
    if one.consumed != other.consumed:
        seen = f"{first.side} consumed {one.consumed}, {last.side} {other.consumed}"
    elif any(abs(loss - same) > tolerance * abs(loss) for loss, same in losses):
        seen = f"{first.side} has the losses {one.losses}, {last.side} {other.losses}"
    else:
        return None
    return f"{last.size} {last.dtype}: {seen}: not the same work"


def measure(benchmark: Benchmark, workload: Workload, side: str, model: Path, trl: Path | None) -> Measurement:
    """Measure in a process of its own.

    Raises subprocess.CalledProcessError, after the end of its log, if that fails.
    """
    with tempfile.TemporaryDirectory(prefix=f"{benchmark.name}-") as name:
        folder = Path(name)
        workload.write(folder / "workload.json")
        our_module, their_module = benchmark.modules
        places = [str(folder / "workload.json"), str(model), str(folder / "result.json")]
        modules = (
            ["benchmarks.as_shipped", f"benchmarks.{our_module}"] if side in OURS else [f"benchmarks.{their_module}"]
        )
        command = [sys.executable, "-m", *modules, *places, side]
        with (folder / "log").open("w+", encoding="utf-8") as log:
            child = subprocess.Popen(command, env=_environment(workload, trl, side), stdout=log, stderr=log)
            try:
                with ProcessWatch(child.pid) as watch:
                    code = child.wait()
            finally:
                child.terminate()  # only where we were interrupted; then it ends its cluster
            if code:
                log.seek(0)
                print(log.read()[-4000:], file=sys.stderr)
                raise subprocess.CalledProcessError(code, command)
        result = Result.read(folder / "result.json")
    others = watch.others(result.began, result.began + sum(step.seconds for step in result.steps))
    return Measurement(workload.size, workload.dtype, side, result, watch.peak, watch.at_peak, others)


def undisturbed(measured: Callable[[], Measurement], unit: str, quiet: float) -> Measurement:
    """Wait until other programs leave the machine idle, and repeat disturbed measurements."""
    while True:
        while quiet < 1 and _others() > quiet:
            time.sleep(10)
        done = measured()
        report = f"{done.size} {done.dtype} {done.side}: {done.throughput:.4g} {unit}/s, others {done.others:.0%}"
        print(report, "" if done.others <= quiet else "disturbed, again", flush=True)
        if done.others <= quiet:
            return done


def _others(seconds: float = 10.0) -> float:
    """Return the share of the machine that is in use while we use nothing."""
    before = busy_seconds()
    time.sleep(seconds)
    return float((busy_seconds() - before) / (seconds * psutil.cpu_count()))


def _environment(workload: Workload, trl: Path | None, side: str) -> dict[str, str]:
    home = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (home, str(trl) if trl else "", os.environ.get("PYTHONPATH"))))
    threads = {name: str(workload.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    others = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}  # a cluster of our own
    return {**others, **threads, **quiet, "PYTHONPATH": path, **(_jemalloc() if side == "trl-jemalloc" else {})}


def _jemalloc() -> dict[str, str]:
    """Return variables for an allocator that keeps freed memory: glibc returns large blocks to the kernel, and
    page-faults again in every step.
    """
    ray = find_spec("ray")
    if ray is None or ray.origin is None:
        raise RuntimeError("Ray's wheel, which has jemalloc in it, is not installed")
    library = Path(ray.origin).parent / "core" / "libjemalloc.so"
    if not library.is_file():
        raise RuntimeError(f"there is no {library}; leave trl-jemalloc out of --sides")
    return {"LD_PRELOAD": str(library), "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0"}


def plan(benchmark: Benchmark, arguments: argparse.Namespace) -> Iterator[tuple[Workload, str]]:
    """Yield the measurements in order: within one size and precision the sides alternate, back and forth."""
    settings = {name: getattr(arguments, name) for name in _options(benchmark)}
    for size in arguments.sizes:
        for dtype in arguments.dtypes:
            workload = benchmark.workload(size, dtype, **settings)
            workload.check()
            sides = [side for side in SIDES[dtype] if arguments.sides is None or side in arguments.sides]
            for repeat in range(arguments.repeats):
                for side in sides if repeat % 2 == 0 else reversed(sides):
                    yield workload, side


def _options(benchmark: Benchmark) -> dict[str, str]:
    return {**benchmark.options, "warm_up": "steps that are not counted", "steps": "steps that are",
            "threads": "of each side"}  # fmt: skip


def parse(benchmark: Benchmark, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"benchmarks.{benchmark.name}", description=benchmark.description)
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--sides", nargs="+", choices=SIDES["bfloat16"], help="all that there are, if not given")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    defaults = benchmark.workload("1m", "float32")
    for name, meaning in _options(benchmark).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(defaults, name), help=f"{meaning} (%(default)s)")
    parser.add_argument("--trl", type=Path, help="a folder with TRL in it, if this environment has none")
    parser.add_argument(
        "--quiet", type=float, default=1.0, metavar="SHARE", help="measure only while others use less of the machine"
    )
    parser.add_argument("--output", type=Path, help="every measurement, as JSON")
    return parser.parse_args(arguments)


def main(benchmark: Benchmark, arguments: Sequence[str]) -> int:
    options = parse(benchmark, arguments)
    if not _has_trl(options.trl) and any(side not in OURS for _, side in plan(benchmark, options)):
        print("error: there is no TRL here: pip install -e .[bench], or name its folder by --trl", file=sys.stderr)
        return 1
    measurements: list[Measurement] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="models-") as name:
        models = {size: Path(name) / size for size in options.sizes}
        for size, folder in models.items():
            workload = next(each for each, _ in plan(benchmark, options) if each.size == size)
            print(f"{size}: {benchmark.make_model(workload, folder):,} parameters")
        for workload, side in plan(benchmark, options):
            measured = partial(measure, benchmark, workload, side, models[workload.size], options.trl)
            measurements.append(undisturbed(measured, benchmark.unit, options.quiet))
            if options.output:
                options.output.write_text(json.dumps(record(options, measurements), indent=1), encoding="utf-8")
            if problem := different_work(benchmark, measurements):
                problems.append(problem)
                print(f"error: {problem}", file=sys.stderr)
    rows = summarise(measurements)
    Console(width=160).print(table(benchmark, rows))
    store_figures(figures(rows))
    return 1 if problems else 0


def _has_trl(folder: Path | None) -> bool:
    return find_spec("trl") is not None if folder is None else (folder / "trl").is_dir()


def record(options: argparse.Namespace, measurements: Sequence[Measurement]) -> dict[str, Any]:
    settings = {name: value for name, value in vars(options).items() if name not in ("trl", "output")}
    return {
        "settings": settings, "cpus": psutil.cpu_count(), "measurements": [asdict(each) for each in measurements]
    }  # fmt: skip
