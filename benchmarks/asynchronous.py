"""RL with rollouts before and beside training, with very unequal episodes: `python -m benchmarks.asynchronous`.

A model of 1M learns a simple preference in episodes of 1 turn, and one in eight of 12 turns. The engine has one core,
and the rank with the driver and the environments another. Each run is a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import unequal_game
from benchmarks.record import store_figures
from benchmarks.stage_alone import stage_inputs
from benchmarks.word_models import SHAPES, make_model, word_ids
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import StageContext
from rlhf_core.data.reading import write_dataset
from rlhf_core.rollout.child_engine import ChildEngine, engine_in_child
from rlhf_core.stages import rl
from rlhf_core.stages.cluster import EngineSpec
from rlhf_core.stages.in_process import InProcessCluster

_SHAPE = SHAPES["1m"]
_PROMPTS, _GROUP, _REPLY, _LONGEST_REPLY, _LONG, _ONE_IN, _SECONDS = 8, 4, 24, 96, 12, 8, 0.05
_ENGINE_CORE, _RANK_CORE = 0, 1
_LAST = 5  # steps whose rewards are averaged
_ROUNDS = "synchronous, in rounds"
SIDES: Mapping[str, dict[str, Any] | None] = {
    _ROUNDS: None,
    "synchronous, concurrent": {"max_lag": 0},
    "lag 1, between replies": {"max_lag": 1, "publish": "between_replies"},
    "lag 1": {"max_lag": 1},
    "lag 1, half a step ahead": {"max_lag": 1, "in_flight": _PROMPTS * 3 // 2},
    "lag 4, between replies": {"max_lag": 4, "publish": "between_replies"},
    "lag 4": {"max_lag": 4},
}


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: float  # of a step, median
    total: float  # from the end of the first step to that of the last
    engine_idle: float  # share of that time
    rank_idle: float
    reward: float  # mean of the last `_LAST` steps
    reached: float  # seconds of `total` until the mean of so many steps reached the target; inf: never
    lag: float


def config(side: str, steps: int) -> RLConfig:
    asynchronous = SIDES[side]
    game = {"vocabulary": len(word_ids(_SHAPE.vocabulary)), "seconds": _SECONDS}
    return RLConfig.model_validate({
        "algorithm": "grpo", "dataset": "prompts", "steps": steps, "prompts_per_step": _PROMPTS,
        "sampling": {"max_tokens": _LONGEST_REPLY},
        "rollout": {"max_length": 1536, "threads": 1, "repeatable": side == next(iter(SIDES)), "cpu_cache_gib": 0.5},
        "placement": {"threads": 1}, "engine": {"dtype": "float32", "zero_stage": 0},
        "checkpoint": {"every_minutes": None}, "asynchronous": asynchronous,
        "environment": {
            "type": "function", "path": unequal_game.__file__, "function": "Unequal", "options": game,
            "max_turns": _LONG,
        },
        "grpo": {
            "group_size": _GROUP, "rewards": {"half": {"type": "environment"}},
            "optimizer": {"learning_rate": 2e-3, "schedule": "constant", "warmup_share": 0.0},
            "mismatch": {"correction": "truncate", "low": 0.0, "high": 2.0},
        },
    })  # fmt: skip


def run(side: str, seed: int, steps: int, reward: float, model: Path) -> Measured:
    """Measure in a process of its own. reward: the threshold whose time is measured."""
    processes: list[psutil.Process] = []

    @contextmanager
    def on_its_core(spec: EngineSpec, context: StageContext) -> Iterator[ChildEngine]:
        os.sched_setaffinity(0, {_ENGINE_CORE})  # which the child inherits, with all its threads
        with engine_in_child(spec.model.folder, spec.settings) as engine:
            os.sched_setaffinity(0, {_RANK_CORE})
            processes.extend([psutil.Process(engine._process.pid), psutil.Process()])
            yield engine

    with tempfile.TemporaryDirectory(prefix="asynchronous-") as name:
        folder = Path(name)
        rows = [
            {"id": str(i), "prompt": [{"role": "user", "content": f"w{10 + i} w{11 + i}"}], "answer": answer}
            for i in range(256)
            for answer in [str(_LONG if i % _ONE_IN == 0 else 1)]
        ]
        write_dataset(folder / "prompts", rows, {})
        inputs, context = stage_inputs(model, folder / "prompts", folder)
        context.seed = seed
        busy: list[list[float]] = []
        log = context.log

        def noted(step: int, metrics: Mapping[str, float]) -> None:
            log(step, metrics)
            busy.append([sum(process.cpu_times()[:2]) for process in processes])

        context.log = noted  # type: ignore[method-assign]
        rl.run(config(side, steps), inputs, context, InProcessCluster(on_its_core))
    times = [ended for ended, _ in context.ended]
    total = times[-1] - times[0]
    engine_idle, rank_idle = (1 - (last - first) / total for first, last in zip(busy[0], busy[-1], strict=True))
    lags = [metrics.get("asynchronous/lag", 0.0) for _, metrics in context.ended]
    rewards = [metrics["reward"] for _, metrics in context.ended]
    means = {end: statistics.fmean(rewards[end - _LAST : end]) for end in range(_LAST, len(rewards) + 1)}
    reached = next((times[end - 1] - times[0] for end, mean in means.items() if mean >= reward), math.inf)
    return Measured(
        statistics.median(after - before for before, after in itertools.pairwise(times)), total, engine_idle,
        rank_idle, means[len(rewards)], reached, statistics.fmean(lags),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--reward", type=float, default=0.5, help="until which the time is measured")
    parser.add_argument("--sides", nargs="+", choices=[*SIDES], default=[*SIDES])
    parsed = parser.parse_args(arguments)
    shown = Table(
        title=f"{parsed.steps} steps of {_PROMPTS} x {_GROUP} episodes; medians of {parsed.seeds} seeds, all rewards"
    )
    for column in (
        "side",
        "s a step",
        "engine idle",
        "rank idle",
        "mean lag",
        "s in all",
        "reward at the end",
        "s to the reward",
    ):
        shown.add_column(column)
    began = time.perf_counter()
    figures: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(_SHAPE, Path(folder), ends_after=_REPLY)
        for side in parsed.sides:
            measurements = [
                _alone(side, seed, parsed.steps, parsed.reward, Path(folder)) for seed in range(parsed.seeds)
            ]

            def median(name: str, measurements: Sequence[Measured] = measurements) -> float:
                return float(statistics.median(getattr(each, name) for each in measurements))

            shown.add_row(
                side, f"{median('seconds'):.2f}", f"{median('engine_idle'):.0%}", f"{median('rank_idle'):.0%}",
                f"{median('lag'):.2f}", f"{median('total'):.0f}",
                ", ".join(f"{each.reward:.3f}" for each in measurements),
                ", ".join(f"{each.reached:.0f}" for each in measurements),
            )  # fmt: skip
            figures[side] = {
                "seconds": [each.seconds for each in measurements],
                "seconds_to_reward": [each.reached for each in measurements],
            }
            if rounds := figures.get(_ROUNDS):
                both = zip(figures[side]["seconds_to_reward"], rounds["seconds_to_reward"], strict=True)
                figures[side]["time_to_reward_of_rounds"] = [own / theirs for own, theirs in both]
            print(f"{side}: {time.perf_counter() - began:.0f} s so far", flush=True)
    Console().print(shown)
    store_figures(figures, seeds=range(parsed.seeds))


def _alone(side: str, seed: int, steps: int, reward: float, model: Path) -> Measured:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, side, seed, steps, reward, model).result()


if __name__ == "__main__":
    main()
