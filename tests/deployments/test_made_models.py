"""Which artifacts of a run are its models, and what a copy of one has."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.console import console
from deployments.cli.made_models import final_models, model_lines
from deployments.cli.main import app
from deployments.cli.run import _end
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.graph.graph import Node, build_graph
from rlhf_core.pipeline.prepare import prepare
from rlhf_core.pipeline.record import NodeRecord, RunRecord
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.artifacts.manifests import manifest


def graph_of(recipe: str, *overrides: str) -> dict[str, Node]:
    return build_graph(load_recipe(recipe, overrides), {})


@pytest.mark.parametrize(
    ("recipe", "overrides", "models"),
    [
        ("tiny", (), ["rl"]),
        ("tiny", ("rl.algorithm=ppo",), ["rl"]),  # which reads the reward model
        ("tiny", ("rl.lora={rank: 2}",), ["merge.rl"]),
        ("tiny", ("rl.lora={rank: 2}", "merge=false", "evaluation=null"), ["rl"]),
        ("tiny", ("rl=null", "evaluation=null"), ["sft", "reward_model"]),
        ("tiny-best-of-n", (), ["again"]),
        ("tiny-best-of-n", ("again.model=base",), ["again"]),  # the model that sampled is below it through a dataset
    ],
)
def test_the_models_are_those_that_nothing_else_is_made_of(
    recipe: str, overrides: tuple[str, ...], models: list[str]
) -> None:
    assert [node.name for node in final_models(graph_of(recipe, *overrides))] == models


def test_the_end_of_a_run_says_what_to_write() -> None:
    graph = graph_of("tiny")
    ref = str(graph["rl"].ref)
    assert list(model_lines(graph)) == [
        ("model", f"{ref} (rl)"), ("  talk with it", f"alignment chat {ref}"),
        ("  serve it", f"alignment serve {ref}"), ("  copy it", f"alignment pull {ref}"),
    ]  # fmt: skip
    both = graph_of("tiny", "rl=null", "evaluation=null")
    assert ("  talk with it", f"alignment chat {both['sft'].ref}") in list(model_lines(both))
    rewards = graph_of("tiny", "pretrain=null", "sft=null", "rl=null", "evaluation=null")
    assert f"alignment serve-reward {rewards['reward_model'].ref}" in dict(model_lines(rewards)).values()
    nothing = [f"{stage}=null" for stage in ("pretrain", "sft", "reward_model", "rl", "evaluation")]
    assert list(model_lines(graph_of("tiny", *nothing))) == []


@pytest.mark.parts
def test_a_run_shows_it_when_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = prepare("tiny", [], store=str(tmp_path))
    node, now = prepared.graph["rl"], datetime.now(UTC)
    rows = (NodeRecord(name="rl", ref=node.ref, outcome="computed"),)
    record = RunRecord(run_id="a", recipe={}, overrides=(), started_at=now, finished_at=now, nodes=rows)
    for item in _end(prepared, record, "http://prefect", report=None):
        console.print(item)
    lines = [f"{what:<14} {shown}" for what, shown in model_lines(prepared.graph)]
    assert capsys.readouterr().out.splitlines()[: len(lines)] == lines


def test_a_copy_of_a_model_is_the_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    repository = ArtifactRepository(open_store(str(tmp_path / "store")))
    for name in ("config.json", "metrics.jsonl", "tracking/tensorboard/events.1", "tracking/wandb/a/run.wandb"):
        (tmp_path / "made" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / name).write_text(name)
    model = repository.publish(manifest("policy"), tmp_path / "made")
    data = repository.publish(manifest("data", "dataset", kind=Kind.DATASET), tmp_path / "made")

    def pulled(folder: str, *arguments: str) -> list[str]:
        done = CliRunner().invoke(app, ["pull", *arguments, folder])
        assert done.exit_code == 0, done.output
        return sorted(path.name for path in (tmp_path / folder).rglob("*") if path.is_file())

    assert pulled("alone", str(model.ref)) == ["config.json"]
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["config.json"]
    everything = ["config.json", "events.1", "metrics.jsonl", "run.wandb"]
    assert pulled("whole", str(model.ref), "--tracking") == everything
    assert pulled("data", str(data.ref)) == everything
