"""A metric of a recipe's evaluations, a value a run: `python -m benchmarks.evaluations METRIC RUN [RUN …]`.

For each model that all runs evaluated. Store it (benchmarks/record.py) at the runs' commit and on their machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.overhead import find_run
from benchmarks.record import store_figures
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.errors import AlignmentError, RecipeError
from rlhf_core.pipeline.record import RunRecord


def figures(records: Sequence[RunRecord], metric: str) -> dict[str, list[float]]:
    """Return the metric by model, in the order of the runs. Raises RecipeError if no model has it in all of them."""
    by_run = [
        {model: value for models in record.evaluations.values() for model, each in models.items()
         if isinstance(value := each.get(metric), float | int)}
        for record in records
    ]  # fmt: skip
    found = {model: [each[model] for each in by_run] for model in by_run[0] if all(model in each for each in by_run)}
    if not found:
        raise RecipeError(f"no model has the metric `{metric}` in the evaluations of all {len(records)} runs")
    return found


def command(records: Sequence[RunRecord]) -> str:
    """Return what started the runs, without their seeds."""
    overrides = [each for each in records[0].overrides if not each.startswith("seed=")]
    return " ".join(["alignment run", str(records[0].recipe["name"]), *overrides, "seed=S"])


def main(arguments: Sequence[str] | None = None) -> int:
    from deployments.stack.environment import load_stack_environment

    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluations", description=__doc__)
    parser.add_argument("metric", help="such as pass@1")
    parser.add_argument("runs", nargs="+", help="their numbers, as `alignment runs` prints them")
    parsed = parser.parse_args(arguments)
    metric, runs = parsed.metric, parsed.runs
    try:
        load_stack_environment()
        store = open_store(store_url())
        records = [find_run(store, run) for run in runs]
        found = figures(records, metric)
    except AlignmentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    table = Table("model", *runs, title=f"{command(records)}: {metric}")
    for model, values in found.items():
        table.add_row(model, *(f"{value:.3f}" for value in values))
    Console().print(table)
    store_figures(found, seeds=[record.recipe["seed"] for record in records], command=command(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
