"""Bad input, through the commands: `plan` and `run` answer alike, in one sentence, before anything starts."""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.recipe.known_recipes import known_recipes
from tests.rlhf_core.artifacts.test_probe import careless_s3
from tests.rlhf_core.recipes import Change, file, model_folder, put, write
from tests.services import LOOPBACK, free_ports, http_server

__all__ = ["careless_s3"]
pytestmark = [pytest.mark.endurance("mutations"), pytest.mark.parametrize("command", ["plan", "run"])]


@pytest.fixture(autouse=True)
def _no_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stack and no Prefect server: a mistake that is not noticed ends with another sentence."""
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    for name in ("PREFECT_API_URL", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))


def said(command: str, *arguments: str) -> str:
    """The one sentence with which the command ends."""
    done = CliRunner().invoke(app, [command, *arguments])
    assert done.exit_code == 1, done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rl.stpes=3", "unknown key `rl.stpes` (did you mean `steps`?)"),
        ("rl.steps=ten", "`rl.steps` is 'ten': it must be a whole number"),
        ("sft.epochs='2'", "`sft.epochs` is '2': it must be a whole number"),
        ("rl.steps=0", "`rl.steps` is 0: it must be from 1 to 10000000"),
        ("sft.batch_size=-1", "`sft.batch_size` is -1: it must be from 1 to 1000000"),
        ("evaluation.rollout.max_length=-8", "`evaluation.rollout.max_length` is -8: it must be from 1 to 10000000"),
    ],
)
def test_a_setting(command: str, tmp_path: Path, override: str, sentence: str) -> None:
    recipe = write(tmp_path)
    assert said(command, recipe, override).startswith(f"override `{override}`: {sentence}")


def test_an_unknown_recipe(command: str) -> None:
    assert said(command, "tinny").startswith("unknown recipe `tinny` (did you mean `tiny`?); known by name are ")
    assert said(command, "no/such.yaml") == "no/such.yaml: there is no such file; `alignment recipes` lists recipes"


def _no_dataset(recipe: dict[str, Any], root: Path) -> None:
    (root / "talks.jsonl").unlink()


def _long_prompt(recipe: dict[str, Any], root: Path) -> None:
    (root / "prompts.jsonl").write_text(json.dumps({"prompt": "x" * 70, "answer": "y"}))
    del recipe["evaluation"]


def _no_weights(recipe: dict[str, Any], root: Path) -> None:
    recipe["base"]["source"] = {"type": "folder", "path": "model"}
    model_folder(root)
    (root / "model" / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_no_dataset, r"data\.talks: talks\.jsonl: there is no such file \(looked for /.*\)"),
        (file("talks.jsonl", ""), r"data\.talks: talks\.jsonl: the file has no rows"),
        (file("talks.jsonl", "what?"), r"data\.talks: talks\.jsonl line 1: not JSON.*"),
        (
            file("prompts.jsonl", '{"promt": "a"}'),
            r"data\.prompts: prompts\.jsonl line 1: no column `prompt` \(did you mean `promt`\?\); it has promt.*",
        ),
        (
            _long_prompt,
            r"rl\.dataset: the prompt of prompts\.jsonl line 1 in `data\.prompts` has 73 tokens; with "
            r"rl\.sampling\.max_tokens=8 that is more than rl\.rollout\.max_length=64: .*",
        ),
        (
            put("sft", "max_length", value=65),
            r"sft\.max_length=65 is more than the model's context of 64 tokens: lower it",
        ),
        (_no_weights, r"base\.source\.path: model: there are no weights in this folder: .*"),
        (file("rewards.py", "def reward("), r"rl\.ppo\.rewards\.own: rewards\.py: syntax error in line 1: .*"),
        (
            file("rewards.py", "x = 1"),
            r"rl\.ppo\.rewards\.own: rewards\.py: there is no function `reward` in this file; it defines x",
        ),
    ],
)
def test_a_file_that_the_recipe_names(command: str, tmp_path: Path, change: Change, sentence: str) -> None:
    found = said(command, write(tmp_path, change))
    assert re.fullmatch(sentence, found), found
    assert not (tmp_path / "store").exists()


def test_an_s3_endpoint_where_nobody_listens(
    command: str, s3_store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"http://{LOOPBACK}:{free_ports(1)[0]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("ALIGNMENT_STORE", s3_store_url)
    assert said(command, write(tmp_path)).startswith(f"no S3 server answers at {endpoint}")


def test_wrong_credentials(command: str, s3_store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("ALIGNMENT_STORE", s3_store_url)
    assert "rejects the credentials" in said(command, write(tmp_path))


@pytest.mark.parametrize("careless_s3", ["If-None-Match", "If-Match"], indirect=True)
def test_a_store_without_conditional_writes(
    command: str, careless_s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_STORE", careless_s3)
    if command == "plan":  # which writes nothing, and so cannot know
        assert CliRunner().invoke(app, [command, write(tmp_path)]).exit_code == 0
    else:
        assert "this store has no conditional writes" in said(command, write(tmp_path))


def test_a_bucket_that_is_not_there(
    command: str, s3_store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_STORE", "s3://nobody/x")
    assert said(command, write(tmp_path)).startswith("there is no bucket `nobody` at http://127.0.0.1")


def test_an_endpoint_that_is_no_address(
    command: str, s3_store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nowhere at all")
    monkeypatch.setenv("ALIGNMENT_STORE", s3_store_url)
    assert said(command, write(tmp_path)).startswith("AWS_ENDPOINT_URL=nowhere at all is not an address of a server")


class _WebPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>not XML of S3")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *arguments: Any) -> None: ...


def test_a_server_that_is_no_s3(
    command: str, s3_store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_STORE", s3_store_url)
    with http_server(_WebPage) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        assert said(command, write(tmp_path)).startswith(f"what answers at {address} is not an S3 server")


def test_a_wrong_command_line(command: str) -> None:
    for arguments, sentence in (
        (["paln"], "there is no command `paln` (did you mean `plan`?); there are alias, "),
        ([command, "--nothing"], "there is no option `--nothing`; a setting is given as key=value, such as seed=1, w"),
        ([command, "x", "--sft.epochs=2"], "there is no option `--sft.epochs`; a setting is given as key=value, "),
        ([command, "x", "--rerun-form=sft"], "there is no option `--rerun-form` (did you mean `--rerun-from`?); a "),
        (["init"], "one of sft, dpo, kto, grpo, ppo, environment, tools, agent, FILE is missing; `"),
        (["init", "sft", "x"], "--model: give a model's folder, or `owner/name` on the hub; `"),
        (["runs", "-n", "many"], "--limit: Input should be a valid integer, "),
        (["init", "--from", "tlr", "a.py", "x"], "--from: 'tlr' is not one of 'trl', 'openrlhf', 'verl'; `"),
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2
        assert done.stderr.startswith(f"error: {sentence}")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("other", [None, "loop", "rounds", "try"])
def test_without_a_recipe_all_are_listed_and_nothing_starts(
    command: str, other: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / "other.yaml").write_text("a: [")
    done = CliRunner().invoke(app, [other or command])
    first, *listed = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (2, "")
    assert first.startswith("error: RECIPE is missing; `")
    assert [line.split()[0] for line in listed] == ["./recipe.yaml", *known_recipes()]
    assert "  A model of 0.65 M parameters learns to spell words backward, " in done.stderr
    assert not (tmp_path / "store").exists()


def test_a_right_recipe_is_planned_and_only_a_run_needs_a_prefect_server(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [command, write(tmp_path)])
    assert "check: 15 to compute" in done.stdout
    assert (command == "run") == (tmp_path / "store").exists(), "a plan writes nothing"
    ends = {
        "plan": (0, ""),
        "run": (1, "error: no Prefect server is configured: run `alignment up`, or set PREFECT_API_URL\n"),
    }
    assert (done.exit_code, done.stderr) == ends[command]
