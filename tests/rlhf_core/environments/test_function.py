"""Environments of a Python file: an episode has a process of its own, and may fail without touching another."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.config.environments.environments import FunctionEnvironment
from rlhf_core.environments import Feedback, Reply
from rlhf_core.environments.function import FunctionHost, ProcessEnvironment
from rlhf_core.errors import EpisodeError, RecipeError, StageError

pytestmark = pytest.mark.parts

HOSTILE = Path(__file__).with_name("hostile.py")
ROW = {"id": "row", "prompt": [{"role": "user", "content": "a?"}], "answer": "b"}


def settings(**changes: Any) -> FunctionEnvironment:
    given = {"type": "function", "path": "hostile.py", "timeout_seconds": 3, "memory_gib": 0.5, **changes}
    return FunctionEnvironment.model_validate(given)


@pytest.fixture(scope="module")
def hostile() -> Iterator[FunctionHost]:
    environments = FunctionHost(settings(), HOSTILE)
    yield environments
    environments.close()


async def said(environment: ProcessEnvironment, *replies: str, seed: int = 0) -> list[Any]:
    """What it answers to each reply, or the text of its EpisodeError, after which nothing is asked any more."""
    answers: list[Any] = []
    try:
        answers.append(await environment.reset(ROW, seed))
        for reply in replies:
            answers.append(await environment.step(Reply(reply, reply)))
    except EpisodeError as error:
        answers.append(str(error))
    finally:
        environment.close()
    return answers


def of_user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


FINE = [of_user("a?!"), Feedback(of_user("1!"), 0.5), Feedback(of_user("2!"), 0.5)]


def test_an_object_for_each_episode_and_what_it_says(hostile: FunctionHost) -> None:
    assert asyncio.run(said(hostile.new(), "fine", "fine")) == FINE
    assert asyncio.run(said(hostile.new(), "waits"))[-1] == Feedback(reward=2, done=True)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (
            "raises",
            "it raised KeyError: 'no such move'\nTraceback (most recent call last):\n  File \"hostile.py\", line ",
        ),
        ("hangs", "it did not return within 3 s and was stopped"),
        ("hangs_in_c", "it did not return within 3 s and was stopped"),
        ("exits", "SystemExit: 3"),
        ("dies", "before it answered, its process ended with status 4; see the log"),
        ("prints_without_end", "it did not return within 3 s and was stopped"),
        ("grows", "MemoryError"),
        ("returns_a_list", "step() returned list, expected a mapping {messages, reward, done}"),
        (
            "returns_another_key",
            "step() returned 'message'; what is read are `messages`, `reward`, `done`, `max_tokens`",
        ),
        ("returns_an_object", "TypeError: object is not a text, number, list, mapping or image"),
        ("answers_at_length", "it answered with more than 1 MiB of text, or 64 MiB with images"),
        ("crashes", "its process was ended by signal 11 (SIGSEGV), a crash in compiled code"),
        ("closes_everything", "before it answered, its process ended with status 1"),
    ],
)
def test_a_failure_is_told_and_touches_no_other_episode(hostile: FunctionHost, reply: str, problem: str) -> None:
    async def together() -> list[list[Any]]:
        return await asyncio.gather(
            said(hostile.new(), "fine", "fine"), said(hostile.new(), "fine", reply), said(hostile.new(), "fine", "fine")
        )

    first, failing, last = asyncio.run(together())
    assert first == last == FINE
    assert failing[:2] == FINE[:2]
    assert problem in failing[2]


def test_an_image_may_be_larger_than_the_text_of_an_answer(hostile: FunctionHost) -> None:
    _, feedback = asyncio.run(said(hostile.new(), "shows_a_large_image"))
    assert isinstance(feedback, Feedback)
    ((part,),) = (message["content"] for message in feedback.messages)
    assert part == {"type": "image", "image": "data:image/png;base64," + base64.b64encode(b"." * 2**20).decode()}


def test_a_turn_may_bound_the_reply_to_it() -> None:
    environments = FunctionHost(settings(function="Brief"), HOSTILE)
    assert asyncio.run(said(environments.new(), "1")) == [
        Feedback(of_user("a?"), max_tokens=2, stop=["b"]), Feedback(max_tokens=1, stop=["c", "d"]),
    ]  # fmt: skip
    environments.close()


def test_an_episode_ends_with_all_that_it_has_started(hostile: FunctionHost) -> None:
    answers = asyncio.run(said(hostile.new(), "leaves_a_process"))
    left = int(answers[-1].messages[0]["content"])
    wait_until(lambda: gone(left))


def test_random_numbers_repeat_with_the_seed(hostile: FunctionHost) -> None:
    one, again, other = (asyncio.run(said(hostile.new(), "first_number", seed=seed))[-1].reward for seed in (7, 7, 8))
    assert one == again != other


def test_numbers_of_other_libraries_are_numbers() -> None:
    environments = FunctionHost(settings(function="numbers", options={"a": 1}), HOSTILE)
    assert asyncio.run(said(environments.new(), "x")) == [ROW["prompt"], Feedback(reward=0.25, done=True)]
    environments.close()


def test_nothing_is_left_of_a_stage_that_ends() -> None:
    async def begin() -> ProcessEnvironment:
        environment = environments.new()
        await environment.reset(ROW, 0)
        return environment

    others = psutil.Process().children(recursive=True)
    environments = FunctionHost(settings(), HOSTILE)
    before = set(psutil.Process().children(recursive=True))
    (host,) = [p for p in before if "rlhf_core.processes.host_process" in p.cmdline() and p not in others]
    with asyncio.Runner() as runner:
        begun = [runner.run(begin()) for _ in range(3)]
        played = set(psutil.Process().children(recursive=True)) - before
        assert len(played) == 3
        environments.close()
        wait_until(lambda: all(gone(process.pid) for process in [*played, host]))
        for environment in begun:
            environment.close()


@pytest.mark.parametrize(
    ("function", "options", "problem"),
    [
        ("WithoutStep", {}, "hostile.py:WithoutStep has no method `step`"),
        ("WithAnOption", {}, r"hostile.py:WithAnOption must take its options \[\], by these names: missing"),
        ("WithAnOption", {"sise": 1}, r"must take its options \['sise'\]"),
        ("Nothing", {}, "there is no function `Nothing` in this file"),
    ],
)
def test_what_makes_no_environment_is_refused(function: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        FunctionHost(settings(function=function, options=options), HOSTILE)


def test_a_file_that_starts_a_thread_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "threads.py"
    file.write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True, name='mine').start()\n"
        "class Environment:\n    def step(self, reply): ...\n"
    )
    with pytest.raises(RecipeError, match=r"loading this file starts a thread \(mine\)"):
        FunctionHost(settings(), file)
    file.write_text("raise ValueError('not today')\nclass Environment:\n    def step(self, reply): ...\n")
    with pytest.raises(StageError, match="ValueError: not today"):
        FunctionHost(settings(), file)


def gone(process: int) -> bool:
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
