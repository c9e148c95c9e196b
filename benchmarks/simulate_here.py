"""Formulas of benchmarks.step_model against runs on this machine: `python -m benchmarks.simulate_here`.

Unit costs are measured by benchmarks/unit_costs.py. From them the step of each layout of 1 and 2 ranks and engines is
predicted, and then measured in the RL stage as shipped: GRPO with a reference, by a model of 25M parameters in float32,
at ZeRO 2. Lengths and numbers of sequences are others than those of the measurements. Needs two idle cores;
`--processor` compares seconds of the processor instead, without those of the driver.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from benchmarks.grpo_ours import measured_steps
from benchmarks.grpo_workload import GRPOWorkload, rows
from benchmarks.logprobs import machine
from benchmarks.record import store_figures
from benchmarks.stage_alone import stage_inputs
from benchmarks.step_inputs import Hardware, Layout, Workload
from benchmarks.step_model import step
from benchmarks.unit_costs import critical, fitted, measured_pair, of_actors, settings, shape_of, unit_costs
from benchmarks.word_models import make_model
from rlhf_core.data.reading import write_dataset
from rlhf_core.rl import loop
from rlhf_core.rl.phases import PhaseTimer
from rlhf_core.stages import rl
from rlhf_core.stages.ray_cluster import RayCluster

P = ParamSpec("P")
R = TypeVar("R")

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))  # ranks and engines
PHASES = {"sampling": "generate", "score": "score", "update": "update", "publish": "publish"}  # as the steps name them


def modelled(workload: GRPOWorkload) -> Workload:
    return Workload(
        shape_of(workload), workload.prompts, workload.group, workload.prompt_tokens, workload.completion_tokens,
        workload.mean_completion, scored=1, weight_bytes=4,
    )  # fmt: skip


class ProcessorTimer(PhaseTimer):
    """The timer of a step's phases, in processor seconds of the busiest rank and the busiest engine."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        before = of_actors()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + critical(before)


def run(workload: GRPOWorkload, model: Path, ranks: int, engines: int, processor: bool) -> dict[str, float]:
    """Return the median seconds of each phase, and of a step, in the stage as shipped. A step of processor seconds is
    the sum of these phases."""
    with tempfile.TemporaryDirectory(prefix="simulate-") as name:
        folder = Path(name)
        write_dataset(folder / "prompts", rows(workload), {})
        inputs, context = stage_inputs(model, folder / "prompts", folder)
        with patch.object(loop, "PhaseTimer", ProcessorTimer if processor else PhaseTimer):
            rl.run(settings(workload, ranks, engines), inputs, context, RayCluster())
    steps = measured_steps(workload, context.ended).steps
    phases = {phase: statistics.median(each.phases[name] for each in steps) for phase, name in PHASES.items()}
    return {**phases, "step": sum(phases.values()) if processor else statistics.median(each.seconds for each in steps)}


def predicted(workload: GRPOWorkload, hardware: Hardware, ranks: int, engines: int) -> dict[str, float]:
    layout = Layout(ranks, engines, micro_batch=workload.tokens_per_micro_batch)
    done = step(modelled(workload), layout, hardware)
    return {**{phase: done.phases[phase] for phase in PHASES}, "step": done.seconds}


def workloads(options: argparse.Namespace) -> dict[str, GRPOWorkload]:
    def work(mean: int, longest: int) -> GRPOWorkload:
        return GRPOWorkload(
            options.size, "float32", prompts=options.prompts, group=8, prompt_tokens=48, completion_tokens=longest,
            mean_completion=mean, warm_up=1, steps=options.steps, threads=1, trl_micro_batch=options.prompts * 8,
        )  # fmt: skip

    return {"equal": work(0, options.longest), "ragged": work(options.longest // 2, 2 * options.longest)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="25m")
    parser.add_argument("--prompts", type=int, default=6, help="of a step, with 8 completions each")
    parser.add_argument("--longest", type=int, default=64, help="tokens of a completion of equal lengths")
    parser.add_argument("--steps", type=int, default=4, help="counted, after one to warm up")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement")
    parser.add_argument("--lengths", nargs="+", choices=("equal", "ragged"), default=["equal", "ragged"])
    parser.add_argument("--layouts", type=int, nargs="+", default=range(len(LAYOUTS)), help=f"numbers in {LAYOUTS}")
    parser.add_argument("--processor", action="store_true", help="processor seconds, for a machine that is not idle")
    options = parser.parse_args(arguments)
    console = Console(width=160)
    console.print(machine())
    table = Table("lengths", "ranks", "engines", *(f"{name}, s" for name in (*PHASES, "step")))
    with tempfile.TemporaryDirectory() as name:
        works, models = workloads(options), {kind: Path(name) / kind for kind in ("equal", "ragged")}
        for kind, work in works.items():
            make_model(work.shape, models[kind], ends_after=work.mean_completion)
        pair = measured_pair(options.repeats, processor=options.processor)
        console.print(f"two processes: {pair}")
        measured = alone(unit_costs, works["equal"], models["equal"], options.repeats, options.processor)
        console.print(f"one rank and one engine: {measured}")
        hardware = fitted(shape_of(works["equal"]), pair, measured)
        console.print(f"{hardware}")
        figures: dict[str, dict[str, dict[str, float]]] = {}
        for kind in options.lengths:
            work = works[kind]
            for ranks, engines in (LAYOUTS[number] for number in options.layouts):
                expected = predicted(work, hardware, ranks, engines)
                seen = alone(run, work, models[kind], ranks, engines, options.processor)
                cells = [
                    f"{expected[each]:.2f} / {seen[each]:.2f} = {expected[each] / seen[each]:.2f}" for each in seen
                ]
                console.print(kind, ranks, engines, *cells)
                figures.setdefault(kind, {})[f"ranks {ranks}, engines {engines}"] = {
                    "predicted_seconds": expected["step"], "measured_seconds": seen["step"],
                    "predicted_of_measured": expected["step"] / seen["step"],
                }  # fmt: skip
                table.add_row(kind, str(ranks), str(engines), *cells)
    table.title = "predicted / measured = ratio"
    console.print(table)
    console.print(f"load average at the end {os.getloadavg()[0]:.1f}")
    store_figures(figures, seeds=[0])


def alone(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function` in a process of its own, which ends Ray."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


if __name__ == "__main__":
    main()
