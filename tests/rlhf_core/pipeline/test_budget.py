"""Budgets: refused at once where they cannot suffice, and a stop once attempts have cost more."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline import budget as module
from rlhf_core.pipeline.budget import BudgetWatch, ExpectedMoney, require_budget, round_over_budget
from rlhf_core.pipeline.expectations import Range
from rlhf_core.pipeline.prepare import Prepared, prepare
from rlhf_core.pipeline.record import RunStart
from tests.rlhf_core.artifacts.test_costs import PRICES, START, attempt

RECIPE = """
name: bounded
tracking: {wandb: false, tensorboard: false}
data: {talks: {format: conversations, source: {type: files, paths: [talks.jsonl]}}}
base: {source: {type: scratch}}
sft: {dataset: talks, batch_size: 2, max_length: 64, optimizer: {learning_rate: 1e-3}}
report: null
"""
CORES = "prices={currency: EUR, core: 3.6}"
SFT = ArtifactRef(stage="sft", key="a" * 64)


def prepared(folder: Path, *overrides: str) -> Prepared:
    rows = [{"prompt": f"What is {i}?", "completion": "a number"} for i in range(40)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "bounded.yaml").write_text(RECIPE, encoding="utf-8")
    return prepare(str(folder / "bounded.yaml"), overrides, store=str(folder / "store"))


@pytest.mark.parametrize(("overrides", "message"), [
    ([], "a budget needs prices: write `prices` in the recipe, or set ALIGNMENT_PRICES"),
    (["prices={currency: EUR, gpus: {'*': 1}}"], "cannot bound base, which runs on cores: give their price"),
    ([CORES, "sft.placement.gpus_per_worker=1"], "cannot bound sft, which reserves GPUs: give their price"),
])  # fmt: skip
def test_what_bounds_nothing_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    run = prepared(tmp_path, *overrides)
    with pytest.raises(RecipeError, match=message):
        require_budget(run, run.graph, 1.0)


def test_a_plan_says_what_it_cannot_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path)
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    said = CliRunner().invoke(app, ["plan", str(tmp_path / "bounded.yaml"), CORES])
    assert said.exit_code == 0, said.output
    assert "estimated cost: unknown, not run before: base, data.talks, sft" in said.output


def test_what_was_spent_before_counts_and_a_larger_budget_goes_on(tmp_path: Path) -> None:
    run = prepared(tmp_path, CORES)
    require_budget(run, run.graph, 0.0)  # nothing is known of its cost
    killed = attempt("before", gpus=0.0, cores=1.0, device="cpu", outcome="killed", memory=0)
    Attempts(run.store, run.graph["sft"].ref).write(killed)
    with pytest.raises(RecipeError, match=(
        r"the budget of 0\.50 EUR does not suffice \(1\.00 EUR are spent already; estimated cost: unknown, not run "
        r"before: base, data\.talks, sft\): raise the budget"
    )):  # fmt: skip
        require_budget(run, run.graph, 0.5)
    require_budget(run, run.graph, 1.5)


@pytest.mark.parametrize(
    ("budget", "expected", "unpriced", "why"),
    [
        (3.0, Range(2.0, 1.0, 9.0, 3), False, ""),  # 1 was spent; the upper end is not held against it
        (2.9, Range(2.0, 1.0, 9.0, 3), False, (
            "the next round was not started: the loop has cost 1.00 EUR of its budget of 2.90 EUR (estimated cost: "
            "≈ 2.00 EUR (1.00 to 9.00), without what was not run before: base): raise the budget, or end the loop"
        )),
        (1.0, None, False, ""),
        (0.9, None, False, "the loop has cost 1.00 EUR of its budget of 0.90 EUR (estimated cost: unknown, not run "),
        (9.0, None, True, "cannot be kept, since `prices` has no price of the GPU AMD MI300: no round was started"),
    ],
)  # fmt: skip
def test_a_round_is_not_started_if_the_loop_is_expected_to_pass_its_budget(
    budget: float, expected: Range | None, unpriced: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "expected_money", lambda estimates: ExpectedMoney(expected, ("base",)))
    spent = [attempt("before", gpus=0.0, cores=1.0, device="cpu", memory=0)]
    if unpriced:
        spent.append(attempt("before", "AMD MI300"))
    over = round_over_budget(prepared(tmp_path, CORES), spent, budget)
    assert why in over
    assert bool(why) == bool(over)


def test_the_budget_of_a_loop_needs_prices(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a budget needs prices"):
        round_over_budget(prepared(tmp_path), [], 1.0)


def test_a_run_is_stopped_once_its_attempts_cost_more_killed_ones_too(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    reused = ArtifactRef(stage="base", key="b" * 64)
    Attempts(store, reused).write(attempt("before"))
    Attempts(store, SFT).write(attempt("before", outcome="killed"))
    nodes = {"base": reused, "sft": SFT}
    start = RunStart(run_id="now", recipe={}, overrides=(), started_at=START, nodes=nodes, reused=("base",))
    watch = BudgetWatch(ArtifactRepository(store), 3.0, PRICES)
    assert watch.look(start) == ""
    stopped = threading.Event()
    with watch.watching(start, stopped.set, every=0.05):
        assert not stopped.wait(0.3)
        later = START + timedelta(seconds=400)
        Attempts(store, SFT).write(attempt("now", id="b", seen_at=later))
        assert stopped.wait(10)
    assert watch.overrun == (
        "the run has cost 3.08 EUR of its budget of 3.00 EUR: its jobs were stopped, and those that train resume from "
        "their checkpoints in a run with a larger budget"
    )


def test_a_gpu_without_a_price_ends_a_bounded_run(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    Attempts(store, SFT).write(attempt("now", "AMD MI300"))
    start = RunStart(run_id="now", recipe={}, overrides=(), started_at=START, nodes={"sft": SFT}, reused=())
    watch = BudgetWatch(ArtifactRepository(store), 3.0, PRICES)
    assert "`prices` has no price of the GPU AMD MI300: the run was stopped; add it" in watch.look(start)
