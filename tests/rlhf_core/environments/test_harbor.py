"""Harbor's task folders: rows, episodes and verdicts; the shipped tasks are solved by their solutions alone."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.chat.templates import SHIPPED
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.environments.environments import HarborEnvironment
from rlhf_core.data.formats import RowError
from rlhf_core.data.sources.base import open_source, raise_bad_row
from rlhf_core.data.sources.harbor import iterate_tasks
from rlhf_core.environments import Feedback, Reply, open_environments
from rlhf_core.environments.harbor import HarborEpisode, HarborHost
from rlhf_core.errors import EpisodeError, RecipeError
from rlhf_core.graph.user_files import user_files
from tests.rlhf_core.chat.families import byte_level
from tests.rlhf_core.stages.context import LocalContext

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("forked")]

SHIPPED_TASKS = Path(__file__).parents[3] / "deployments" / "recipes" / "tiny_harbor"
CHATML = byte_level(SHIPPED["chatml"].text)
SETTINGS = {"type": "harbor", "parser": "hermes", "max_turns": 3, "edits": True, "command_seconds": 20.0}


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {where: {"id": where, **row} for where, row in iterate_tasks(folder, folder.name, raise_bad_row)}


@pytest.fixture(scope="module")
def harbor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarborHost]:
    config = HarborEnvironment.model_validate(SETTINGS)
    with open_environments(config, LocalContext(tmp_path_factory.mktemp("work")), CHATML) as environments:
        assert isinstance(environments, HarborHost)
        yield environments


def configured(harbor: HarborHost, **settings: Any) -> HarborHost:
    """With other settings, in the same runtimes."""
    config = HarborEnvironment.model_validate(SETTINGS | settings)
    return HarborHost(config, harbor._runtimes, harbor._parser, harbor._opened)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(harbor: HarborHost, row: dict[str, Any], *replies: str, last: bool = True) -> list[Feedback]:
    async def play() -> list[Feedback]:
        with closing(harbor.new()) as episode:
            assert isinstance(episode, HarborEpisode)
            assert await episode.reset(row, 0) == row["prompt"]
            feedback = [
                await episode.step(Reply(reply, reply, is_last=last and number == len(replies)))
                for number, reply in enumerate(replies, 1)
            ]
            return [*feedback, Feedback(reward=await episode.finish())]

    return asyncio.run(play())


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task that any reply solves."""
    for folder in ("environment", "tests", "solution"):
        (tmp_path / "tasks" / "one" / folder).mkdir(parents=True)
    folder = tmp_path / "tasks" / "one"
    (folder / "task.toml").write_text('[task]\nname = "org/one"\n[verifier]\ntimeout_sec = 5\nenv = {WANTED = "1"}\n')
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /work\nCOPY given .\n")
    (folder / "environment" / "given").write_text("given")
    (folder / "tests" / "test.sh").write_text("echo $WANTED > /logs/verifier/reward.txt\n")
    (folder / "solution" / "solve.sh").write_text("secret")
    return folder


def row_of(task: Path) -> dict[str, Any]:
    (row,) = rows_of(task.parent).values()
    return row


TASKS = sorted(path.parent for path in SHIPPED_TASKS.rglob("task.toml"))


def test_twelve_tasks_are_shipped() -> None:
    assert len(TASKS) == 12
    assert len({(task / "instruction.md").read_text() for task in TASKS}) == 12


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_shipped_task_is_solved_by_its_solution_alone(harbor: HarborHost, task: Path) -> None:
    (row,) = rows_of(task).values()
    solution = (task / "solution" / "solve.sh").read_text()
    assert [feedback.reward for feedback in played(harbor, row, call("bash", command=solution))] == [1.0, 0.0]
    assert [feedback.reward for feedback in played(harbor, row, "done")] == [0.0, 0.0]


def test_an_episode_works_in_a_runtime_until_a_reply_has_no_call(harbor: HarborHost, task: Path) -> None:
    assert [schema["function"]["name"] for schema in harbor.tools] == ["bash", "edit"]
    edit = call("edit", path="given", old="given", new="changed")
    looks = call("bash", command="pwd; cat given; ls /tests /solution; false")
    first, second, last, final = played(harbor, row_of(task), edit, looks, "I am done.", last=False)
    assert [message["content"] for message in first.messages] == ["given is written"]
    (result,) = second.messages
    assert result["content"].startswith("/work\nchanged")
    assert "cannot access '/solution'" in result["content"]
    assert result["content"].endswith(
        "[exit status 2]" if "[exit status 2]" in result["content"] else "[exit status 1]"
    )
    assert second.metrics == {"tool_calls": 1, "tool_errors": 1}
    assert (last.reward, last.done, final.reward) == (1.0, True, 0.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"path": "given", "old": "x", "new": "y"}, "Error: `old` occurs 0 times in given, not once"),
        ({"path": "given", "old": "", "new": "y"}, "Error: given is there already"),
        ({"path": "absent", "old": "x", "new": "y"}, "Error: there is no file absent"),
        ({"path": "new/file", "old": "", "new": "y"}, "new/file is written"),
        ({"path": "given"}, "Error: the arguments must be {path, old, new}, all text"),
    ],
)
def test_edits(harbor: HarborHost, task: Path, arguments: dict[str, str], text: str) -> None:
    (feedback, _) = played(harbor, row_of(task), call("edit", **arguments), last=False)
    assert feedback.messages[0]["content"].startswith(text)


def test_a_reply_that_was_cut_is_not_run_and_the_task_is_tested(harbor: HarborHost, task: Path) -> None:
    (task / "tests" / "test.sh").write_text("test -e made; echo $? > /logs/verifier/reward.txt\n")

    async def play() -> Feedback:
        with closing(harbor.new()) as episode:
            await episode.reset(row_of(task), 0)
            reply = call("bash", command="touch made")
            return await episode.step(Reply(reply, reply, is_last=True, was_cut=True))

    assert asyncio.run(play()) == Feedback(reward=1.0, done=True)


def test_the_policy_cannot_plant_a_reward_or_a_test(harbor: HarborHost, task: Path) -> None:
    (task / "tests" / "test.sh").write_text("ls /tests | wc -l > /logs/verifier/reward.txt\n")
    plants = (
        "echo 9 > /logs/verifier/reward.txt; echo x > /tests/more; "
        "(setsid bash -c 'while :; do echo 9 > /logs/verifier/reward.txt; done' &)"
    )
    assert played(harbor, row_of(task), call("bash", command=plants))[0].reward == 1.0
    links = "rm -rf /logs /tests; ln -s /tmp /logs; ln -s /tmp /tests; echo 9 > /tmp/reward.txt"
    assert played(harbor, row_of(task), call("bash", command=links))[0].reward == 1.0


@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25),
        ("echo '{\"reward\": 0.5, \"style\": 1}' > /logs/verifier/reward.json", 0.5),
        ("echo '{\"tests\": 2}' > /logs/verifier/reward.json", 2.0),
        ("echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 0}' > /logs/verifier/reward.json", 1.0),
        ("echo 1 > /logs/verifier/reward.txt; exit 1", 1.0),
        ("exit 3", "its tests ended with status 3 and wrote neither"),
        ("echo high > /logs/verifier/reward.txt", "wrote 'high' to .*reward.txt, which is not a finite number"),
        ("echo nan > /logs/verifier/reward.txt", "not a finite number"),
        ("echo '{' > /logs/verifier/reward.json", "which is not valid JSON"),
        ("echo '[1]' > /logs/verifier/reward.json", "which is not a mapping of rewards"),
        ("echo '{\"a\": 1, \"b\": 2}' > /logs/verifier/reward.json", "with a, b, none of them `reward`"),
    ],
)  # fmt: skip
def test_the_reward_is_what_the_tests_write(harbor: HarborHost, task: Path, test: str, reward: float | str) -> None:
    (task / "tests" / "test.sh").write_text(f"{test}\n")
    row = row_of(task)
    if isinstance(reward, str):
        with pytest.raises(EpisodeError, match=reward):
            played(harbor, row, "done")
    else:
        assert played(harbor, row, "done")[0].reward == reward


def test_tests_without_a_verdict(harbor: HarborHost, task: Path) -> None:
    (task / "tests" / "test.sh").write_text("exit 3\n")
    feedback, _ = played(configured(harbor, without_reward="zero"), row_of(task), "done")
    assert (feedback.reward, feedback.metrics) == (0.0, {"tests_without_reward": 1.0})
    (task / "tests" / "test.sh").write_text("sleep 100\n")
    feedback, _ = played(configured(harbor, test_seconds=0.5), row_of(task), "done")
    assert (feedback.reward, feedback.metrics) == (0.0, {"tests_stopped": 1.0})


def test_a_row_has_what_an_episode_needs_and_no_solution(task: Path) -> None:
    (cache := task / "tests" / "__pycache__").mkdir()
    (cache / "x.pyc").write_bytes(b"\0")
    row = row_of(task)
    assert (row["prompt"], row["task"], row["harbor"]["test_seconds"]) == ("Do it.", "org/one", 5.0)
    assert {name: sorted(row["harbor"][name]) for name in ("environment", "tests")} == {
        "environment": ["Dockerfile", "given"], "tests": ["test.sh"],
    }  # fmt: skip
    assert "c2VjcmV0" not in json.dumps(row), "the solution, in base64"
    source = DatasetConfig.model_validate({"format": "prompts", "source": {"type": "harbor", "folder": "tasks"}})
    root = task.parents[1]
    files = user_files(source, root)
    assert [path.removeprefix("tasks/one/") for path in files] == [
        "environment/Dockerfile", "environment/given", "instruction.md", "solution/solve.sh", "task.toml",
        "tests/test.sh",
    ]  # fmt: skip
    assert source.source is not None
    (read,) = open_source(source.source).rows(
        LocalContext(root / "work", user_files_root=root), "prompts", raise_bad_row
    )
    assert read == ("tasks/one", {name: value for name, value in row.items() if name != "id"})
    (task / "tests" / "test.sh").write_text("echo 0\n")
    assert user_files(source, root) != files


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda task: (task / "tests" / "test.sh").unlink(), "it has no tests/test.sh"),
        (lambda task: (task / "instruction.md").unlink(), "it has no instruction.md, or is a task of several steps"),
        (lambda task: (task / "instruction.md").write_text(" \n"), "instruction.md is empty"),
        (lambda task: (task / "task.toml").write_text("[["), "task.toml or instruction.md cannot be read: "),
        (lambda task: (task / "task.toml").write_text("verifier = 1"), "`verifier` of task.toml must be a table"),
        (lambda task: (task / "task.toml").write_text("[verifier]\ntimeout_sec = -1"), "must be a number of seconds"),
        (lambda task: (task / "task.toml").write_text('[[steps]]\nname = "a"'), "a task of several steps"),
        (lambda task: (task / "task.toml").write_text('[environment]\nos = "windows"'), "only linux is supported"),
        (
            lambda task: (task / "task.toml").write_text('[environment]\nenv = {A = "${KEY}"}'),
            "is a variable of the mach",
        ),
        (lambda task: (task / "environment" / "docker-compose.yaml").touch(), "several containers"),
        (lambda task: (task / "tests" / "large").write_bytes(bytes(2**22)), "more than 4 MiB"),
    ],
)
def test_a_task_that_cannot_be_played_is_a_bad_row(task: Path, change: Any, problem: str) -> None:
    change(task)
    with pytest.raises(RowError, match=problem):
        rows_of(task.parent)


def test_what_is_no_task_is_refused(harbor: HarborHost, task: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RowError, match="there is no folder of a task"):
        rows_of(tmp_path / "empty")
    with pytest.raises(RecipeError, match=r"source\.folder: empty: this folder has no file"):
        user_files(
            DatasetConfig.model_validate({"format": "prompts", "source": {"type": "harbor", "folder": "empty"}}),
            tmp_path,
        )
    with pytest.raises(RecipeError, match="it is not a task of Harbor"):
        harbor.of_row({"id": "x", "prompt": []})
    with pytest.raises(RecipeError, match="`harbor` is not a task of Harbor"):
        harbor.of_row({"id": "x", "prompt": [], "harbor": {"environment": {"a": "?"}}})
    (task / "environment" / "Dockerfile").write_text("FROM debian\nUSER agent\n")
    with pytest.raises(RecipeError, match="`USER agent` of the Dockerfile needs an image"):
        harbor.of_row(row_of(task))
    shutil.rmtree(task / "environment")
    (task / "task.toml").write_text('[environment]\ndocker_image = "org/image:1"')
    with pytest.raises(RecipeError, match="the image org/image:1 needs the runtime `container` or `remote`"):
        harbor.of_row(row_of(task))
