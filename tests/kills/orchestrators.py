"""Two orchestrators of one recipe at the same time, round after round: each artifact is computed by one of their jobs.

Both processes run the flow of the same recipe, the second up to three seconds after the first; a round's seed gives it
keys of its own. Both must succeed, and each artifact has one attempt.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.opening import open_store
from rlhf_core.pipeline.prepare import prepare
from tests.chaos.scenario import Place, leftovers, processes_left, started_stack, until

_SECONDS = 300.0  # of a round
_MOST_APART = 3.0  # seconds between the starts of both
_CODE = """
def rows(seed, size):
    return [{"text": f"{seed + number} words"} for number in range(size)]
"""
_RECIPE: dict[str, Any] = {
    "name": "followed", "tracking": {"wandb": False, "tensorboard": False}, "report": None,
    "data": {
        "words": {
            "format": "text",
            "source": {"type": "function", "path": "rows.py", "function": "rows", "options": {"seed": 0, "size": 64}},
        },
    },
    "base": {
        "dtype": "float32",
        "source": {"type": "scratch", "words": ["words"], "hidden_size": 16, "intermediate_size": 32, "layers": 1,
                   "heads": 2, "context_length": 32},
    },
    "pretrain": {
        "dataset": "words", "batch_size": 4, "max_length": 16, "max_steps": 5,
        "optimizer": {"learning_rate": 1e-3}, "engine": {"dtype": "float32", "zero_stage": 0},
    },
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills.orchestrators", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orchestrators-") as temporary, pytest.MonkeyPatch.context() as patch:
        folder = Path(temporary)
        with started_stack(folder, patch) as place:
            (folder / "rows.py").write_text(_CODE)
            recipe = folder / "followed.yaml"
            recipe.write_text(json.dumps(_RECIPE))  # which is YAML too
            _run_rounds(place, str(recipe), given)
        until(lambda: processes_left(place) == set(), lambda: f"the end of {processes_left(place)}", 60)
    return 0


def _run_rounds(place: Place, recipe: str, given: argparse.Namespace) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flows.alignment"])  # which takes seconds to import
    generator = random.Random(given.seed)
    store = open_store(place.environment["ALIGNMENT_STORE"])
    for number in range(given.rounds):
        overrides, apart = [f"seed={given.seed + number}"], generator.uniform(0, _MOST_APART)
        first, second = (
            context.Process(target=_orchestrate, args=(recipe, overrides, str(place.folder))) for _ in "ab"
        )
        began = time.monotonic()
        first.start()
        time.sleep(apart)
        second.start()
        for process in (first, second):
            process.join(_SECONDS)
        codes = [process.exitcode for process in (first, second)]
        assert codes == [0, 0], (number, apart, codes, (place.folder / "orchestrators.log").read_text()[-3000:])
        for name, node in prepare(recipe, overrides).graph.items():
            attempts = Attempts(store, node.ref).all()
            assert [each.outcome for each in attempts] == ["published"], (number, apart, name, attempts)
        print(f"round {number}: {apart:.2f} s apart, {time.monotonic() - began:.1f} s", flush=True)
    until(lambda: not leftovers(place), lambda: f"the end of {leftovers(place)}", 120)


def _orchestrate(recipe: str, overrides: list[str], folder: str) -> None:
    with (Path(folder) / "orchestrators.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    from flows.alignment import alignment

    alignment(recipe, overrides)


if __name__ == "__main__":
    sys.exit(main())
