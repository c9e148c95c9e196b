"""`alignment init`: what it writes can be planned as it is, and nothing that exists is overwritten."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.init import STARTERS, Method, filled, model_source
from deployments.cli.main import app
from rlhf_core.pipeline.prepare import check
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.recipes import model_folder

pytestmark = pytest.mark.parts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model_folder(tmp_path, context=1024)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("method", "nodes"),
    [
        (Method.sft, ["data.conversations", "base", "sft", "merge.sft", "report"]),
        (Method.dpo, ["data.pairs", "base", "preference", "merge.preference", "report"]),
        (Method.grpo, ["data.questions", "base", "rl", "merge.rl", "report"]),
        (Method.ppo, ["data.pairs", "data.questions", "base", "reward_model", "rl", "evaluation.rl", "report"]),
        (Method.kto, ["data.labelled", "base", "kto", "merge.kto", "evaluation.kto", "report"]),
        (Method.environment, ["data.games", "base", "rl", "merge.rl", "evaluation.rl", "report"]),
        (Method.agent, ["data.questions", "base", "rl", "merge.rl", "evaluation.rl", "report"]),
    ],
)
def test_a_starter_can_be_planned_as_it_is(tmp_path: Path, model: Path, method: Method, nodes: list[str]) -> None:
    done = CliRunner().invoke(app, ["init", method, str(tmp_path / "mine"), "--model", str(model)])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == f"next: alignment plan {tmp_path}/mine/recipe.yaml"
    assert {"data.held_out", "evaluation.base", *nodes} <= set(check(f"{tmp_path}/mine/recipe.yaml", []).graph)


@pytest.mark.parametrize("method", [*Method])
@pytest.mark.parametrize(("context", "length", "answer"), [(64, 64, 16), (512, 512, 128), (131_072, 1024, 128)])
def test_lengths_fit_the_context_of_the_model(
    tmp_path: Path, method: Method, context: int, length: int, answer: int
) -> None:
    model_folder(tmp_path, context=context)
    done = CliRunner().invoke(app, ["init", method, str(tmp_path / "mine"), "--model", str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "mine" / "recipe.yaml").read_text()
    assert set(re.findall(r"max_length: (\w+)", text)) == {str(length)}
    assert set(re.findall(r"max_tokens: (\w+)", text)) == {str(answer)}
    load_recipe(f"{tmp_path}/mine/recipe.yaml")


def test_a_model_below_or_beside_the_recipe_is_named_by_a_relative_path(tmp_path: Path) -> None:
    for place, expected in (("project/models", "../models/model"), ("project/mine", "model"), ("far", None)):
        (tmp_path / place).mkdir(parents=True)
        model_folder(tmp_path / place)
        model = tmp_path / place / "model"
        source = model_source(str(model), tmp_path / "project" / "mine")
        assert source == f'{{type: folder, path: "{expected or model}"}}'


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gpro", "there is no starter `gpro` (did you mean `grpo`?); there are sft, dpo, kto, grpo, ppo, "),
        ("simpo", "there is no starter `simpo`: `simpo` is a loss of the stage `preference`: write `preference: {data"),
    ],
)
def test_no_starter(tmp_path: Path, name: str, sentence: str) -> None:
    done = CliRunner().invoke(app, ["init", name, str(tmp_path / "mine"), "--model", "some/thing"])
    assert done.exit_code == 1
    assert done.output.startswith(f"error: {sentence}")
    assert len(done.output.splitlines()) == 1


@pytest.mark.parametrize("value", ["128", "1048576", "12345678"])
def test_comments_keep_their_column_if_there_is_room(value: str) -> None:
    starter = "rl:\n  sampling: {max_tokens: ANSWER}    # of an answer\n  steps: 1                          # a few\n"
    _, filled_in, steps, _ = filled(starter, {"ANSWER": value}).split("\n")
    assert filled_in.startswith(f"  sampling: {{max_tokens: {value}}}  ")
    assert (filled_in.index("#") == steps.index("#")) == (len(value) <= 8)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", "sft", str(tmp_path / "mine"), "--model", str(tmp_path)])
    assert (done.exit_code, done.output) == (1, f"error: --model {tmp_path}: there is no config.json in this folder\n")


def test_every_starter_is_tested_and_needs_a_model() -> None:
    assert {folder.name for folder in STARTERS.iterdir()} == {"shared", *Method}
    for method in Method:
        assert (STARTERS / method / "recipe.yaml").read_text().count("MODEL") == 1


def test_a_model_of_the_hub(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", "sft", str(tmp_path / "mine"), "--model", "some/thing"])
    assert done.exit_code == 0, done.output
    base = load_recipe(f"{tmp_path}/mine/recipe.yaml").recipe.stages["base"]
    assert base.model_dump()["source"] == {"type": "hub", "repository": "some/thing", "revision": "main"}


@pytest.mark.parametrize("name", ["nowhere", "a b/c d: }", "./some/thing", "a/b/c", "/tmp/no such"])
def test_no_model(tmp_path: Path, name: str) -> None:
    done = CliRunner().invoke(app, ["init", "sft", str(tmp_path / "mine"), "--model", name])
    assert done.exit_code == 1
    assert f"error: --model {name}: there is no such folder, and on the hub a model is `owner/name`" in done.output
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("existing", ["a file", "a folder with a file"])
def test_nothing_is_overwritten(tmp_path: Path, model: Path, existing: str) -> None:
    target = tmp_path / "mine"
    if existing == "a file":
        target.write_text("kept")
    else:
        target.mkdir()
        (target / "recipe.yaml").write_text("kept")
    done = CliRunner().invoke(app, ["init", "sft", str(target), "--model", str(model)])
    assert done.exit_code == 1
    assert f"error: {target} exists already" in done.output
    assert (target if target.is_file() else target / "recipe.yaml").read_text() == "kept"


def test_a_failure_leaves_nothing_that_is_in_the_way_of_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    (tmp_path / "link").symlink_to(odd)
    done = CliRunner().invoke(app, ["init", "sft", str(tmp_path / "mine"), "--model", str(tmp_path / "link")])
    assert (done.exit_code, "its name is not UTF-8" in done.output) == (1, True)
    empty = CliRunner().invoke(app, ["init", "sft", str(tmp_path / "mine"), "--model", ""])
    assert (empty.exit_code, "error: --model is empty" in empty.output) == (1, True)
    assert not (tmp_path / "mine").exists()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")  # an empty folder will do, the current one too
    assert CliRunner().invoke(app, ["init", "sft", ".", "--model", "some/thing"]).exit_code == 0
    assert Path("recipe.yaml").is_file()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("alignment-scratch")]
