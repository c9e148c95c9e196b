"""Kill any part of a run at random moments, over a graph, a loop and an agent, until there were enough kills.

Each run is finished in a store of its own, and compared with one that nothing disturbs: the same artifacts, with the
same bits where the recipe is deterministic. Nothing is computed twice, and nothing is left.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
from pathlib import Path

import pytest

from tests.chaos.scenario import Place, processes_left, started_stack, until
from tests.kills.killed_run import KilledRun, Subject, of_store
from tests.kills.recipes import write_recipes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of all runs together")
    parser.add_argument("--most", type=int, default=12, help="of one run, which does not get on between them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("graph", "loop", "agent"), action="append", help="of the recipes")
    parser.add_argument("--log", type=Path, default=Path("outputs/kills.jsonl"), help="gets a line for each run")
    given = parser.parse_args()
    given.log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary, pytest.MonkeyPatch.context() as patch:
        folder = Path(temporary)
        with started_stack(folder, patch) as place:
            killed = _kill_runs(place, given, write_recipes(folder / "recipes"))
        until(lambda: processes_left(place) == set(), lambda: f"the end of {processes_left(place)}", 60)
    parts = collections.Counter(kill.part for run in killed for kill in run.kills)
    print(f"{parts.total()} kills in {len(killed)} runs: {dict(parts.most_common())}")
    return 0


def _kill_runs(place: Place, given: argparse.Namespace, recipes: dict[str, str]) -> list[KilledRun]:
    subjects = [
        Subject("graph", recipes["graph"]),
        Subject("loop", recipes["loop"], rounds=2),
        Subject("agent", recipes["agent"], is_deterministic=False),
    ]
    subjects = [subject for subject in subjects if not given.only or subject.name in given.only]
    generator = random.Random(given.seed)
    whole = {}
    for subject in subjects:
        run = KilledRun(subject, of_store(place, f"{subject.name}-whole"), generator)
        run.finish(0)
        whole[subject.name] = run.digests()
        print(f"{subject.name}: {run.seconds:.0f} s undisturbed, {len(whole[subject.name])} files", flush=True)
    killed: list[KilledRun] = []
    left = given.kills
    while left > 0:
        subject = subjects[len(killed) % len(subjects)]
        run = KilledRun(subject, of_store(place, f"{subject.name}-{len(killed)}"), generator)
        run.finish(min(left, given.most))
        _require_equal(subject, whole[subject.name], run.digests())
        killed.append(run)
        left -= len(run.kills)
        with given.log.open("a") as log:
            log.write(json.dumps({"seed": given.seed, **run.summary()}) + "\n")
        print(f"{subject.name}: equal after {len(run.kills)} kills, {run.starts} starts, {run.seconds:.0f} s; "
              f"{left} kills are left", flush=True)  # fmt: skip
    return killed


def _require_equal(subject: Subject, whole: dict[str, str], killed: dict[str, str]) -> None:
    """Raise AssertionError if there are other files, or, of a deterministic recipe, others' contents."""
    assert killed.keys() == whole.keys(), sorted(killed.keys() ^ whole.keys())
    if subject.is_deterministic:
        assert killed == whole, sorted(name for name in whole if killed[name] != whole[name])


if __name__ == "__main__":
    sys.exit(main())
