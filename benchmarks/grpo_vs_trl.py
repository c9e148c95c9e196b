"""GRPO by us and by TRL on the same work: `python -m benchmarks.grpo_vs_trl --trl FOLDER`.

The same model, prompts, number and length of completions, precision and threads; one optimizer step a batch, no KL.
Every measurement is a process of its own, the sides take turns, and the first steps of each are not counted. TRL comes
with `pip install -e .[bench]`, or is put beside this environment: `pip install --target FOLDER --no-deps trl==1.16.0`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.grpo_workload import SHAPES, Workload, make_model
from benchmarks.process_memory import ProcessWatch, busy_seconds

OURS = "ours"
# Which sides there are in which precision; those of TRL are the paths of grpo_trl.
SIDES = {
    "float32": (OURS, "trl"),
    "bfloat16": (OURS, "trl", "trl-bf16-weights"),
}
PHASES = ("generate", "score", "update", "publish")
AIM = 1.5  # times the best of TRL's paths, at 25m


@dataclass(frozen=True, slots=True)
class Measurement:
    """One process: seconds of each counted step by phase, and what else was seen."""

    size: str
    dtype: str
    side: str
    tokens: int  # trained in one step
    steps: list[dict[str, float]]
    peak: int  # bytes
    at_peak: dict[str, int]  # bytes of each program then
    others: float  # share of the machine that other programs used during the counted steps
    versions: dict[str, str]

    @property
    def throughput(self) -> float:
        """Completion tokens trained a second."""
        return self.tokens * len(self.steps) / sum(step["seconds"] for step in self.steps)

    def seconds(self, phase: str) -> float:
        """Of one step, on average; `other` is what belongs to no phase."""
        if phase == "other":
            return self.seconds("seconds") - sum(self.seconds(name) for name in PHASES)
        return sum(step[phase] for step in self.steps) / len(self.steps)


@dataclass(frozen=True, slots=True)
class Row:
    """All measurements of one side at one size and precision."""

    size: str
    dtype: str
    side: str
    throughput: tuple[float, float, float]  # least, median, most
    peak: int
    phases: dict[str, float]  # medians, seconds a step
    ratio: float | None  # to the best of TRL's paths; None for TRL's own rows


def summarise(measurements: Sequence[Measurement]) -> list[Row]:
    """One row a side, in the order in which they come."""
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for each in measurements:
        groups.setdefault((each.size, each.dtype, each.side), []).append(each)
    medians = {key: statistics.median(each.throughput for each in group) for key, group in groups.items()}
    return [_row(key, group, medians) for key, group in groups.items()]


def _row(key: tuple[str, str, str], group: Sequence[Measurement], medians: dict[tuple[str, str, str], float]) -> Row:
    size, dtype, side = key
    peers = [median for other, median in medians.items() if other[:2] == key[:2] and other[2] != OURS]
    throughputs = [each.throughput for each in group]
    return Row(
        size, dtype, side,
        throughput=(min(throughputs), medians[key], max(throughputs)),
        peak=max(each.peak for each in group),
        phases={name: statistics.median(each.seconds(name) for each in group) for name in (*PHASES, "other")},
        ratio=medians[key] / max(peers) if side == OURS and peers else None,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    shown = Table(
        title="GRPO against TRL",
        caption=f"seconds are medians of one step; ratio: ours to the best of TRL's, the aim at 25m is {AIM}",
    )
    for column in ("model", "dtype", "side"):
        shown.add_column(column)
    for column in ("tokens/s", "least-most", "memory MiB", *PHASES, "other", "ratio"):
        shown.add_column(column, justify="right")
    previous = None
    for row in rows:
        if previous not in (None, (row.size, row.dtype)):
            shown.add_section()
        previous = (row.size, row.dtype)
        least, median, most = row.throughput
        shown.add_row(
            row.size, row.dtype, row.side, f"{median:.0f}", f"{least:.0f}-{most:.0f}", f"{row.peak / 2**20:.0f}",
            *(f"{seconds:.2f}" for seconds in row.phases.values()), "" if row.ratio is None else f"{row.ratio:.2f}",
        )  # fmt: skip
    return shown


def measure(workload: Workload, side: str, model: Path, trl: Path | None) -> Measurement:
    """In a process of its own. Raises subprocess.CalledProcessError, after the end of its log, if that fails."""
    with tempfile.TemporaryDirectory(prefix="grpo-vs-trl-") as name:
        folder = Path(name)
        workload.write(folder / "workload.json")
        module = ["benchmarks.grpo_ours"] if side == OURS else ["benchmarks.grpo_trl"]
        places = [str(folder / "workload.json"), str(model), str(folder / "result.json")]
        command = [sys.executable, "-m", *module, *places, *([] if side == OURS else [side])]
        with (folder / "log").open("w+", encoding="utf-8") as log:
            child = subprocess.Popen(command, env=_environment(workload, trl), stdout=log, stderr=log)
            try:
                with ProcessWatch(child.pid) as watch:
                    code = child.wait()
            finally:
                child.terminate()  # only where we were interrupted; then it ends its cluster
            if code:
                log.seek(0)
                print(log.read()[-4000:], file=sys.stderr)
                raise subprocess.CalledProcessError(code, command)
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    began, steps = result["began"], result["steps"]
    others = watch.others(began, began + sum(step["seconds"] for step in steps))
    return Measurement(
        workload.size, workload.dtype, side, workload.tokens, steps, watch.peak, watch.at_peak, others,
        result["versions"],
    )  # fmt: skip


def measure_undisturbed(workload: Workload, side: str, model: Path, options: argparse.Namespace) -> Measurement:
    """Waits until other programs leave the machine alone, and measures again what they have disturbed."""
    while True:
        while options.quiet < 1 and _others() > options.quiet:
            time.sleep(10)
        done = measure(workload, side, model, options.trl)
        report = f"{workload.size} {workload.dtype} {side}: {done.throughput:.0f} tokens/s, others {done.others:.0%}"
        print(report, "" if done.others <= options.quiet else "disturbed, again", flush=True)
        if done.others <= options.quiet:
            return done


def _others(seconds: float = 10.0) -> float:
    """The share of the machine that is in use while we use nothing."""
    before = busy_seconds()
    time.sleep(seconds)
    return float((busy_seconds() - before) / (seconds * psutil.cpu_count()))


def _environment(workload: Workload, trl: Path | None) -> dict[str, str]:
    home = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (home, str(trl) if trl else "", os.environ.get("PYTHONPATH"))))
    threads = {name: str(workload.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    others = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}  # a cluster of our own
    return {**others, **threads, **quiet, "PYTHONPATH": path}


def plan(arguments: argparse.Namespace) -> Iterator[tuple[Workload, str]]:
    """What is measured, in order: within one size and precision the sides take turns, back and forth."""
    for size in arguments.sizes:
        for dtype in arguments.dtypes:
            workload = Workload(
                size, dtype, prompts=arguments.prompts, group=arguments.group,
                prompt_tokens=arguments.prompt_tokens, completion_tokens=arguments.completion_tokens,
                micro_batch=arguments.micro_batch, warm_up=arguments.warm_up, steps=arguments.steps,
                threads=arguments.threads,
            )  # fmt: skip
            workload.check()
            sides = [side for side in SIDES[dtype] if arguments.sides is None or side in arguments.sides]
            for repeat in range(arguments.repeats):
                for side in sides if repeat % 2 == 0 else reversed(sides):
                    yield workload, side


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.grpo_vs_trl", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--sides", nargs="+", choices=SIDES["bfloat16"], help="all that there are, if not given")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    counts = {"prompts": "of a step", "group": "completions of a prompt", "prompt_tokens": "", "completion_tokens": "",
              "micro_batch": "sequences of one forward", "warm_up": "steps that are not counted",
              "steps": "steps that are", "threads": "of each side"}  # fmt: skip
    defaults = Workload("1m", "float32")
    for name, meaning in counts.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(defaults, name), help=meaning or None)
    parser.add_argument("--trl", type=Path, help="a folder with TRL in it, if this environment has none")
    parser.add_argument(
        "--quiet", type=float, default=1.0, metavar="SHARE", help="measure only while others use less of the machine"
    )
    parser.add_argument("--output", type=Path, help="every measurement, as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if not _has_trl(options.trl) and any(side != OURS for _, side in plan(options)):
        print("error: there is no TRL here: pip install -e .[bench], or name its folder by --trl", file=sys.stderr)
        return 1
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="grpo-models-") as name:
        models = {size: Path(name) / size for size in options.sizes}
        for size, folder in models.items():
            print(f"{size}: {make_model(SHAPES[size], folder):,} parameters")
        for workload, side in plan(options):
            measurements.append(measure_undisturbed(workload, side, models[workload.size], options))
            if options.output:
                options.output.write_text(json.dumps(record(options, measurements), indent=1), encoding="utf-8")
    Console(width=160).print(table(summarise(measurements)))
    return 0


def _has_trl(folder: Path | None) -> bool:
    return find_spec("trl") is not None if folder is None else (folder / "trl").is_dir()


def record(options: argparse.Namespace, measurements: Sequence[Measurement]) -> dict[str, Any]:
    settings = {name: value for name, value in vars(options).items() if name not in ("trl", "output")}
    return {
        "settings": settings, "cpus": psutil.cpu_count(), "measurements": [asdict(each) for each in measurements]
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
