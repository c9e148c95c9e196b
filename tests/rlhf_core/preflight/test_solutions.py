"""A plan solves a task of Harbor by its own solution, which must earn more than no work."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deployments.stack.environment import RECIPES
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.prepare import check

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("forked")]

TASKS = "tiny_harbor/tasks"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    shutil.copytree(RECIPES / "tiny_harbor", tmp_path / "tiny_harbor")
    for name in ("tiny-harbor.yaml", "tiny_harbor.py", "tiny_tools.jinja"):
        shutil.copy(RECIPES / name, tmp_path / name)
    return tmp_path / "tiny-harbor.yaml"


def first_task(recipe: Path) -> Path:
    return min((recipe.parent / TASKS).iterdir())


def notes(recipe: Path, *overrides: str) -> list[str]:
    return check(str(recipe), list(overrides)).check_solutions(None)


def test_shipped_tasks_are_tried_in_a_sandbox_before_a_run(recipe: Path) -> None:
    assert notes(recipe) == []


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        (
            "tests/test.sh",
            "echo 0.5 > /logs/verifier/reward.txt",
            "give its solution 0.5, and 0.5 if nothing was done: ",
        ),
        ("tests/test.sh", "true", "its tests ended with status 0 and wrote neither"),
        ("solution/solve.sh", "echo oh no; exit 3", "its solution ended with status 3: oh no"),
        ("solution/solve.sh", "true", "give its solution 0, and 0 if nothing was done: "),
    ],
)
def test_tests_that_tell_nothing_apart_stop_a_plan(recipe: Path, file: str, text: str, problem: str) -> None:
    task = first_task(recipe)
    (task / file).write_text(text)
    with pytest.raises(RecipeError) as caught:
        notes(recipe)
    first = str(caught.value).splitlines()[0]
    assert first.startswith("rl.environment: the t")
    assert problem in first
    assert f"{TASKS}/{task.name}" in first
    assert notes(recipe, "rl.environment.check_solution=false", "evaluation=null") == []


def test_a_plan_says_what_it_did_not_try(recipe: Path) -> None:
    container = "rl.environment.runtime={type: container, image: debian}"
    (note,) = notes(recipe, container, "evaluation=null")
    assert note == "rl.environment: no tests were tried, since the runtime `container` is of the nodes"
    for task in (recipe.parent / TASKS).iterdir():
        shutil.rmtree(task / "solution")
    assert notes(recipe, "evaluation=null") == ["rl.environment: no task has solution/solve.sh, so no tests were tried"]


def test_a_runtime_without_what_tasks_ask_for_is_noted(recipe: Path) -> None:
    task = first_task(recipe)
    settings = (task / "task.toml").read_text().replace("memory_mb = 256", "memory_mb = 4096\nallow_internet = true")
    (task / "task.toml").write_text(settings)
    sandbox = ["rl.environment.check_solution=false", "evaluation=null"]
    assert notes(recipe, *sandbox) == [
        "rl.environment: of what task.toml asks for, the runtime `sandbox` has less: memory_mb = 4096, not 256, "
        "allow_internet = 1, not 0; see its settings"
    ]
    container = "rl.environment.runtime={type: container, image: debian, network: true, memory_gib: 4}"
    assert notes(recipe, *sandbox, container) == []


def test_a_solution_may_read_files_beside_it(recipe: Path) -> None:
    task = first_task(recipe)
    (task / "solution" / "answer").touch()
    (task / "solution" / "solve.sh").write_text("cp /solution/answer .")
    (task / "tests" / "test.sh").write_text("[ -f answer ] && n=1 || n=0\necho $n > /logs/verifier/reward.txt")
    assert notes(recipe, "evaluation=null") == []
