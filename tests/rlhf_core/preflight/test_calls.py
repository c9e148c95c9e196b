"""The user's rewards and environments, called once by `plan` and `run` before any job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.prepare import check
from rlhf_core.preflight import calls as preflight_calls
from tests.rlhf_core.artifacts.manifests import manifest
from tests.rlhf_core.preflight.test_images import IMAGE, seeing
from tests.rlhf_core.recipes import QUESTION, both, file, put, write

pytestmark = pytest.mark.parts

REWARD = "def reward(completions, prompts, rows):\n"
ENVIRONMENT = """
class Environment:
    def reset(self, row):
        self.word = row["answer"]
        return row["prompt"]

    def step(self, reply):
"""


def called(
    folder: Path, reward: str, repository: ArtifactRepository | None = None, **settings: Any
) -> tuple[list[str], Path]:
    """The notes, and a file that the code may write as `said`."""
    said = folder / "said"
    code = f"said = {str(said)!r}\n{reward}"
    rewards = {"own": {"type": "function", "path": "code/own.py", **settings}, "preference": {"type": "reward_model"}}
    recipe = write(folder, both(file("code/own.py", code), put("rl", "ppo", "rewards", value=rewards)))
    return check(recipe, []).call_functions(repository), said


def played(folder: Path, step: str, **settings: Any) -> list[str]:
    environment = {"type": "function", "path": "play.py", **settings}
    code = f"{ENVIRONMENT}        {step}\n"
    return check(
        write(folder, both(file("play.py", code), put("rl", "environment", value=environment))), []
    ).call_functions(None)


def test_a_reward_is_called_once_with_a_row_of_its_dataset(tmp_path: Path) -> None:
    body = "    print(completions, prompts, rows[0]['answer'], file=open(said, 'a'))\n    return [0.5]\n"
    notes, said = called(tmp_path, REWARD + body)
    assert notes == []
    assert said.read_text() == f"['yes'] {[QUESTION]} four\n"


def test_a_row_whose_images_are_not_read_yet_is_left_to_the_job(tmp_path: Path) -> None:
    rows = [{"prompt": "colour?", "answer": "red", "image": IMAGE}, {"prompt": "a", "answer": "b"}]
    said = tmp_path / "said"
    code = f"{REWARD}    print(rows[0]['answer'], file=open({str(said)!r}, 'a'))\n    return [0.5]\n"
    change = seeing(file("prompts.jsonl", "\n".join(map(json.dumps, rows))), file("rewards.py", code))
    assert check(write(tmp_path, change), []).call_functions(None) == []
    assert said.read_text() == "b\n"


def test_what_is_computed_already_calls_nothing(tmp_path: Path) -> None:
    """A result is there: its function is not needed, and what it needed may be gone."""
    broken = f"{REWARD}    raise KeyError('gone')\n"
    with pytest.raises(RecipeError):
        called(tmp_path, broken)
    store = ArtifactRepository(LocalStore(tmp_path / "store"))
    graph = check(str(tmp_path / "recipe.yaml"), []).graph
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "weights").write_text("")
    rl = graph["rl"].ref
    store.publish(manifest("rl").model_copy(update={"stage": rl.stage, "key": rl.key}), tmp_path / "made")
    assert called(tmp_path, broken, store)[0] == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("    return [row['anwser'] for row in rows]", "own raised KeyError: 'anwser' (code/own.py, line 3)"),
        ("    return 0.5", "own returned float, expected a list of 1 numbers"),
        ("    return [0.5, 0.5]", "own returned 2 values for 1 completions"),
        ("    return [float('nan')]", "own, completion 0: the reward is nan"),
        ("    import os; os._exit(3)", "its process ended with status 3"),
        ("    import time; time.sleep(60)", "own did not return within 0.5 s and was stopped"),
        ("    breakpoint()\n    return [0.5]", "own raised bdb.BdbQuit"),
    ],
)
def test_a_reward_that_fails_is_refused_before_a_job(
    tmp_path: Path, body: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)  # `ray.init` sets it
    seconds = 0.5 if "sleep" in body else 60
    with pytest.raises(RecipeError) as caught:
        called(tmp_path, f"{REWARD}{body}\n", timeout_seconds=seconds)
    assert str(caught.value).startswith("rl.ppo.rewards.own: code/own.py:reward")
    assert says.removeprefix("own") in str(caught.value)
    assert "; it was called with the completion 'yes' of prompts.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["plan", "run"])
def test_the_commands_call_it(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    with pytest.raises(RecipeError):
        called(tmp_path, f"{REWARD}    raise KeyError('x')\n")
    done = CliRunner().invoke(app, [command, str(tmp_path / "recipe.yaml")])
    assert done.exit_code == 1
    assert "rl.ppo.rewards.own: code/own.py:reward raised KeyError: 'x' (code/own.py, line 3)" in done.output


def test_failures_that_a_job_tolerates_are_notes(tmp_path: Path) -> None:
    (note,), _ = called(tmp_path, f"{REWARD}    raise KeyError('x')\n", tolerated_failures=0.5)
    assert note.startswith("rl.ppo.rewards.own: code/own.py:reward raised KeyError: 'x' (code/own.py, line 3); it was")


def test_a_function_is_not_called_where_only_its_job_has_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = f"{REWARD}    raise ConnectionError('not from here')\n"
    assert called(tmp_path, broken, call_before_job=False)[0] == []
    monkeypatch.delenv("OWN_TOKEN", raising=False)
    (note,), _ = called(tmp_path, broken, variables=["OWN_TOKEN"])
    assert note == "rl.ppo.rewards.own is not called before its job: the variable OWN_TOKEN is not set here"


def test_a_library_that_only_jobs_have_is_no_mistake(tmp_path: Path) -> None:
    lacking = f"{REWARD}    raise ModuleNotFoundError(\"No module named 'vllm.outputs'\")\n"
    (note,), _ = called(tmp_path, lacking)
    assert note == "rl.ppo.rewards.own is not called before its job: vllm is not installed here"


def test_a_call_that_takes_longer_than_a_plan_waits_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_calls, "_LONGEST_SECONDS", 0.5)
    (note,), _ = called(tmp_path, f"{REWARD}    import time; time.sleep(60)\n", timeout_seconds=90)
    assert note.startswith("rl.ppo.rewards.own: code/own.py:reward did not return within 0.5 s")
    assert note.endswith("; its job waits 90 s")


def test_an_environment_plays_one_turn(tmp_path: Path) -> None:
    assert played(tmp_path, "return {'reward': float(reply == self.word), 'done': True}") == []
    with pytest.raises(RecipeError) as caught:
        played(tmp_path, "return {'reward': self.words[reply], 'done': True}")
    assert str(caught.value).startswith(
        "rl.environment: play.py:Environment: it raised AttributeError: 'Environment' object has no attribute 'words'"
    )
    assert "(play.py, line 8)" in str(caught.value)
    with pytest.raises(RecipeError, match=r"step\(\) returned 'rewrad'; what is read are `messages`, `reward`"):
        played(tmp_path, "return {'rewrad': 1.0}")
    with pytest.raises(RecipeError, match=r"play\.py:Environment: it did not return within 0\.5 s and was stopped"):
        played(tmp_path, "import time; time.sleep(60)", timeout_seconds=0.5)


def test_each_environment_of_rows_is_played_with_a_row_that_names_it(tmp_path: Path) -> None:
    rows = (
        '{"prompt": "a", "answer": "b", "environment": "fine"}\n{"prompt": "a", "answer": "c", "environment": "bad"}\n'
    )
    code = f"{ENVIRONMENT}        return {{'reward': 1.0 / (self.word != 'c'), 'done': True}}\n"
    choices = {
        name: {"type": "function", "path": "play.py", "max_turns": turns} for name, turns in (("fine", 2), ("bad", 3))
    }
    change = both(
        file("play.py", code), file("prompts.jsonl", rows),
        put("rl", "environment", value={"type": "by_row", "choices": choices}),
    )  # fmt: skip
    with pytest.raises(RecipeError) as caught:
        check(write(tmp_path, change), []).call_functions(None)
    (problem,) = str(caught.value).splitlines()
    assert problem.startswith("rl.environment.choices.bad: play.py:Environment: it raised ZeroDivisionError")
    assert "of prompts.jsonl line 2" in problem
    tolerant = put("rl", "environment", "tolerated_failures", value=0.5)
    (note,) = check(write(tmp_path, both(change, tolerant)), []).call_functions(None)
    assert note.startswith("rl.environment.choices.bad: play.py:Environment: it raised ZeroDivisionError")
