"""The costs of runs in a store: while they run, after they were killed, and at other prices."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.cli.tables import cost_totals, outcome_table
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import RecipeError, StoreError
from rlhf_core.pipeline.record import NodeRecord, RunRecord, RunStart, write_needs, write_record, write_start
from rlhf_core.pipeline.run_costs import run_costs
from rlhf_core.recipe.prices import prices_of, read_prices
from tests.rlhf_core.artifacts.test_costs import PRICES, START, attempt

SFT, RL = (ArtifactRef(stage=stage, key="a" * 64) for stage in ("sft", "rl"))
RECIPE = {"name": "r", "prices": PRICES.model_dump(mode="json")}


@pytest.fixture
def repository(tmp_path: Path) -> ArtifactRepository:
    store = LocalStore(tmp_path / "store")
    Attempts(store, SFT).write(attempt("before"))
    Attempts(store, RL).write(attempt("now", outcome="running"))  # killed: nobody has its lease
    write_start(
        store,
        RunStart(
            run_id="now", recipe=RECIPE, overrides=(), started_at=START, nodes={"sft": SFT, "rl": RL}, reused=("sft",)
        ),
    )
    return ArtifactRepository(store)


def test_a_run_that_was_killed_is_known_by_its_attempts(repository: ArtifactRepository) -> None:
    costs = run_costs(repository, "now")
    sft, rl = costs.stages
    assert (sft.outcome, round(sft.saved.money, 2), sft.own.money) == ("reused", 2.2, 0.0)
    assert (rl.outcome, round(rl.own.money, 2), rl.attempts[0].outcome) == ("killed", 2.2, "killed")


@pytest.mark.parametrize("unknown", ["other", "../x", ""])
def test_an_unknown_run_is_an_error_that_names_the_newest_runs(repository: ArtifactRepository, unknown: str) -> None:
    for i in range(4):
        start = RunStart(run_id=f"a{i}", recipe=RECIPE, overrides=(), started_at=START, nodes={})
        write_start(repository.store, start)
    write_needs(repository.store, "try-1", [])
    sentence = f" has no run `{unknown}`: its newest are now, a3, a2, and `alignment runs` lists all"
    with pytest.raises(StoreError, match=f"^{re.escape(repository.store.url + sentence)}$"):
        run_costs(repository, unknown)


def test_a_store_without_runs_names_the_command_that_makes_one(tmp_path: Path) -> None:
    empty = ArtifactRepository(LocalStore(tmp_path / "empty"))
    with pytest.raises(StoreError, match=r"has no run `now`: it has none yet, `alignment run RECIPE` makes one$"):
        run_costs(empty, "now")


def test_a_run_that_runs_again_is_known_by_its_attempts(repository: ArtifactRepository) -> None:
    node = NodeRecord(name="rl", ref=RL, outcome="failed")
    before = START - timedelta(hours=1)
    record = RunRecord(run_id="now", recipe=RECIPE, overrides=(), started_at=before, finished_at=START, nodes=(node,))
    write_record(repository.store, record)
    assert [stage.outcome for stage in run_costs(repository, "now").stages] == ["reused", "killed"]


def test_another_price_recomputes_and_json_has_each_attempt(
    repository: ArtifactRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime(2026, 1, 3, tzinfo=UTC)
    nodes = (NodeRecord(name="rl", ref=RL, outcome="computed", attempts=tuple(Attempts(repository.store, RL).all())),)
    write_record(
        repository.store,
        RunRecord(run_id="now", recipe=RECIPE, overrides=(), started_at=now, finished_at=now, nodes=nodes),
    )
    monkeypatch.setenv("ALIGNMENT_STORE", repository.store.url)
    dearer = tmp_path / "dearer.yaml"
    dearer.write_text("currency: USD\ngpus: {'*': 36}\n")
    said = CliRunner().invoke(app, ["cost", "now", "--json", "--prices", str(dearer)])
    assert said.exit_code == 0, said.output
    answer = json.loads(said.output)
    assert (answer["currency"], answer["own"]["money"], answer["saved"]["money"]) == ("USD", pytest.approx(20.0), 0.0)
    assert answer["stages"][0]["attempts"][0]["attempt"]["outcome"] == "killed"
    assert answer["stages"][0]["attempts"][0]["cost"]["gpu_seconds"] == 2000
    table = CliRunner().invoke(app, ["cost", "now"]).output
    assert "this run: 2.20 EUR (0.556 GPU hours, 2.78 core hours)" in table


def test_the_last_table_of_a_run_has_what_stages_cost_and_reuse_saved() -> None:
    nodes = (
        NodeRecord(name="sft", ref=SFT, outcome="reused", attempts=(attempt("before"),)),
        NodeRecord(name="rl", ref=RL, outcome="computed", attempts=(attempt("now", outcome="killed"), attempt("now"))),
    )
    record = RunRecord(run_id="now", recipe=RECIPE, overrides=(), started_at=START, finished_at=START, nodes=nodes)
    shown = StringIO()
    console = Console(file=shown, width=120)
    console.print(outcome_table(record, PRICES))
    console.print(outcome_table(record))
    for line in cost_totals(record.costs(PRICES), PRICES):
        console.print(line)
    text = shown.getvalue()
    for expected in (
        "saved 2.20 EUR", "4.40 EUR", "saved 0.556 GPU h", "1.11 GPU h",
        "this run: 4.40 EUR (1.11 GPU hours, 5.56 core hours)",
        "saved by reuse: 2.20 EUR (0.556 GPU hours, 2.78 core hours)",
    ):  # fmt: skip
        assert expected in text
    assert "other runs" not in text


def test_prices_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prices_of(None) is None
    file = tmp_path / "prices.yaml"
    file.write_text("currency: EUR\ncore: 0.05\n")
    monkeypatch.setenv("ALIGNMENT_PRICES", str(file))
    prices = prices_of(None)
    assert prices is not None
    assert prices.core == 0.05
    file.write_text("currency: EUR\ncores: 0.05\n")
    with pytest.raises(RecipeError, match=r"no table of prices \(cores: "):
        read_prices(file)
