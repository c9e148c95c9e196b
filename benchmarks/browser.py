"""Time of the pages of `alignment ui` on a store with many runs and many logged completions.

python -m benchmarks.browser [--runs 1000] [--completions 1000000] [--repeat 7]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from deployments.ui.demo import write_demo
from deployments.ui.pages import Pages
from deployments.ui.reading import StoreReader
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.recipe.prices import PRICES_VARIABLE

_PROMPTS = _COMPLETIONS = 10  # of a logged step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--completions", type=int, default=1_000_000, help="logged in all runs together")
    parser.add_argument("--repeat", type=int, default=7)
    arguments = parser.parse_args()
    steps = max(1, round(arguments.completions / (arguments.runs * _PROMPTS * _COMPLETIONS)))
    with tempfile.TemporaryDirectory() as folder:
        repository = ArtifactRepository(LocalStore(Path(folder) / "store"))
        began = time.monotonic()
        write_demo(repository, runs=arguments.runs, steps=steps, prompts=_PROMPTS, completions=_COMPLETIONS)
        logged = arguments.runs * steps * _PROMPTS * _COMPLETIONS
        print(f"{arguments.runs} runs with {logged} completions, written in {time.monotonic() - began:.0f} s")
        prices = Path(folder) / "prices.yaml"
        prices.write_text("{currency: EUR, core: 0.1}\n", encoding="utf-8")
        os.environ[PRICES_VARIABLE] = str(prices)
        reader = StoreReader(repository, Path(folder) / "cache")
        measure(Pages(reader), reader, steps, arguments.repeat)


def measure(pages: Pages, reader: StoreReader, steps: int, repeat: int) -> None:
    """Print the seconds of each page at first and again, and the process's peak memory."""
    began = time.monotonic()
    pages.runs({}, {})
    print(f"{'runs, at first':24} {time.monotonic() - began:7.3f} s")
    run, other, *_ = reader.runs()
    here = {"run": run.run_id, "node": "rl", "step": str(steps), "group": "0", "completion": "0"}
    queries: dict[str, Callable[[], str]] = {
        "runs": lambda: pages.runs({}, {}),
        "runs, searched": lambda: pages.runs({}, {"q": "seed=7"}),
        "runs, by cost": lambda: pages.runs({}, {"sort": "cost", "min_cost": "0"}),
        "run": lambda: pages.run(here, {}),
        "stage": lambda: pages.node(here, {}),
        "step": lambda: pages.step(here, {}),
        "prompt": lambda: pages.group(here, {}),
        "completion": lambda: pages.completion(here, {}),
        "compare": lambda: pages.compare({}, {"run": f"{run.run_id} {other.run_id}"}),
        "models": lambda: pages.models({}, {}),
        "model": lambda: pages.model({"model": "sums"}, {}),
        "loops": lambda: pages.loops({}, {}),
        "loop": lambda: pages.loop({"loop": "nightly"}, {}),
    }
    for name, query in queries.items():
        began = time.monotonic()
        query()
        first = time.monotonic() - began
        seconds = []
        for _ in range(repeat):
            began = time.monotonic()
            query()
            seconds.append(time.monotonic() - began)
        print(f"{name:24} {statistics.median(seconds):7.3f} s, slowest {max(seconds):.3f} s, at first {first:.3f} s")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
