from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.rewards.rewards import FunctionReward
from rlhf_core.errors import RecipeError, RewardError
from rlhf_core.rewards import build_text_reward
from rlhf_core.rewards.function import RewardFunction
from tests.rlhf_core.stages.context import LocalContext

pytestmark = pytest.mark.parts

SOURCE = """
import asyncio, decimal, fractions, functools, os, sys, time
import numpy as np

calls = []

def lengths(completions, prompts, rows, factor=1.0):
    print("to the log, not to the pipe")
    return [factor * len(c) + len(p) + row["bonus"] for c, p, row in zip(completions, prompts, rows)]

def metrics(completions, prompts, rows):
    calls.append(len(completions))
    return [{"reward": 1, "score": 0.5, "calls": len(calls)} for _ in completions]

def array(completions, prompts, rows): return np.arange(len(completions), dtype=np.float32)
def numpy_items(completions, prompts, rows): return [np.float32(0.5) for _ in completions]
def raises(completions, prompts, rows): return [1 / len(c) for c in completions]
async def raises_later(completions, prompts, rows):
    await asyncio.sleep(0)
    return [1 / 0]
def not_finite(completions, prompts, rows): return [0.0, float("nan")]
def infinite(completions, prompts, rows): return [float("-inf"), 0.0]
def short(completions, prompts, rows): return [1.0]
def nothing(completions, prompts, rows): return None
def none_inside(completions, prompts, rows): return [1.0, None]
def text_inside(completions, prompts, rows): return [1.0, "good"]
def no_reward(completions, prompts, rows): return [{"reward": 1.0}, {"rewrad": 1.0}]
def big_score(completions, prompts, rows): return [{"reward": 1.0, "score": 2}] * 2
def ragged(completions, prompts, rows): return [{"reward": 1.0, "a": 1.0}, {"reward": 1.0}]
def dies(completions, prompts, rows): os._exit(3)
def hangs(completions, prompts, rows):
    while True:
        sum(range(10_000_000))
def hangs_on_empty(completions, prompts, rows):
    if not completions[0]:
        time.sleep(60)
    return [float(os.getpid()) for _ in completions]
def takes_two(completions, prompts): return [1.0, 1.0]
def swapped(rows, prompts, completions): return [len(c) for c in completions]
def keywords(completions, **others): return [len(p) for p in others["prompts"]]
def other_names(c, p, r): return [1.0, 1.0]
def column(completions, prompts, rows, answer): return [1.0, 1.0]
def generator(completions, prompts, rows):
    for c in completions: yield 1.0
class Judge:
    def __init__(self, completions, prompts, rows): ...
    def __call__(self, completions, prompts, rows): return [2.0 for _ in completions]
judge = Judge(0, 0, 0)
part = functools.partial(lengths, factor=0.0)
shorthand = lambda completions, prompts, rows: [True, False]
@functools.wraps(lengths)
def wrapper(*args, **kwargs): return lengths(*args, **kwargs)
loops = []
async def awaits(completions, prompts, rows):
    await asyncio.sleep(0)
    loops.append(asyncio.get_running_loop())
    assert len(set(map(id, loops))) == 1
    return [float(len(c)) for c in completions]
def exits(completions, prompts, rows): sys.exit(0)
def reads(completions, prompts, rows): return [float(len(sys.stdin.read())) for _ in completions]
def forks(completions, prompts, rows):
    child = os.fork()
    if child == 0:
        return [-1.0 for _ in completions]
    os.waitpid(child, 0)
    return [float(len(c)) for c in completions]
def decimals(completions, prompts, rows): return [decimal.Decimal("0.5"), fractions.Fraction(1, 4)]
def nested(completions, prompts, rows): return [[1.0], [0.0]]
def huge(completions, prompts, rows): return [10 ** 400, 0]
def complex_numbers(completions, prompts, rows): return np.array([1j, 0])
def some_fail(completions, prompts, rows): return [None if c == "bad" else 1.0 for c in completions]
def raises_for_bad(completions, prompts, rows):
    if "bad" in completions: raise ValueError("cannot judge this")
    return [{"reward": 1.0, "score": 1.0, "words": len(c.split())} for c in completions]
"""


JSON_REPLACED = "import json\n\njson.dumps = json.loads = lambda *a, **k: 'x'\n\n"


@pytest.fixture
def context(tmp_path: Path) -> LocalContext:
    (tmp_path / "rewards.py").write_text(SOURCE)
    return LocalContext(tmp_path / "work", user_files_root=tmp_path)


def config(function: str, **settings: Any) -> FunctionReward:
    return FunctionReward(type="function", path="rewards.py", function=function, **settings)


@pytest.fixture
def judge(context: LocalContext) -> Iterator[Any]:
    made = []

    def call(function: str, completions: tuple[str, ...] = ("a", ""), **settings: Any) -> Any:
        made.append(build_text_reward(config(function, **settings), context))
        return made[-1](completions, ["p"] * len(completions), [{"bonus": 10.0}] * len(completions))

    yield call
    for reward in made:
        reward.close()


def test_it_gets_completions_prompts_rows_and_options(judge: Any) -> None:
    result = judge("lengths", ("abc", ""), options={"factor": 2.0})
    assert (result.rewards, result.scores, result.extra) == ([17.0, 11.0], [None, None], {})


def test_a_fork_of_the_function_replies_no_second_time(context: LocalContext) -> None:
    """Else each call would get the reply to the one before."""
    reward = RewardFunction(config("forks", timeout_seconds=5), context.user_file("rewards.py"))
    assert [reward([text], ["p"], [{}]).rewards for text in ("a", "bb", "ccc")] == [[1.0], [2.0], [3.0]]
    reward.close()


def test_a_fork_that_a_file_makes_as_it_is_loaded_replies_no_second_time(context: LocalContext) -> None:
    file = context.user_file("rewards.py")
    file.write_text("import os\nchild = os.fork()\nif child: os.waitpid(child, 0)\n" + SOURCE)
    reward = RewardFunction(config("keywords", timeout_seconds=5), file)
    assert reward(["a", "b"], ["p", "p"], [{}, {}]).rewards == [1.0, 1.0]
    reward.close()


def test_mappings_give_scores_and_extra_metrics_in_batches_of_one_process(judge: Any) -> None:
    result = judge("metrics", ("a", "b", "c"), batch_size=2)
    assert result.rewards == [1.0, 1.0, 1.0]
    assert result.scores == [0.5, 0.5, 0.5]
    assert result.extra == {"calls": [1.0, 1.0, 2.0]}


@pytest.mark.parametrize(
    ("function", "rewards"),
    [
        ("decimals", [0.5, 0.25]),
        ("array", [0.0, 1.0]), ("numpy_items", [0.5, 0.5]), ("shorthand", [1.0, 0.0]), ("swapped", [1.0, 0.0]),
        ("keywords", [1.0, 1.0]), ("judge", [2.0, 2.0]), ("part", [11.0, 11.0]), ("wrapper", [12.0, 11.0]),
        ("awaits", [1.0, 0.0]), ("reads", [0.0, 0.0]),
    ],
)  # fmt: skip
def test_any_function_that_takes_the_three_by_name_and_any_numbers(
    judge: Any, function: str, rewards: list[float]
) -> None:
    assert judge(function, batch_size=2).rewards == rewards


def test_what_the_file_replaces_of_json_is_its_own_affair(judge: Any, context: LocalContext) -> None:
    file = context.user_file("rewards.py")
    file.write_text(JSON_REPLACED + file.read_text())
    assert judge("array").rewards == [0.0, 1.0]


def test_one_event_loop_serves_all_batches(judge: Any) -> None:
    assert judge("awaits", ("a", "bb", "ccc"), batch_size=1).rewards == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("function", ["some_fail", "raises_for_bad"])
def test_a_share_of_failures_is_tolerated_and_not_a_reward(judge: Any, function: str) -> None:
    completions = ("a", "bad", "c c", "d")
    result = judge(function, completions, tolerated_failures=0.25, batch_size=1)
    assert list(result.failures) == [1]
    assert [result.rewards[index] for index in (0, 2, 3)] == [1.0, 1.0, 1.0]
    assert math.isnan(result.rewards[1])
    with pytest.raises(
        RewardError, match=r"failed for 1 of 4 completions, more than its `tolerated_failures` of 0\.2;"
    ):
        judge(function, completions, tolerated_failures=0.2, batch_size=1)
    with pytest.raises(RewardError, match=r"cannot judge this|the reward is None"):
        judge(function, completions)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("not_finite", "completion 1: the reward is nan, expected a finite number"),
        ("infinite", "completion 0: the reward is -inf"),
        ("short", "returned 1 values for 2 completions"),
        ("nothing", "returned NoneType, expected a list of 2 numbers"),
        ("none_inside", "completion 1: the reward is None, expected a number"),
        ("text_inside", "completion 1: the reward is 'good', expected a number"),
        ("no_reward", "completion 1: there is no `reward` in ['rewrad']"),
        ("big_score", "completion 0: the score is 2.0, expected 0 to 1"),
        ("ragged", "completion 1: has the metrics [], the completions before it have ['a']"),
        ("dies", "its process ended with status 3, before it returned"),
        ("exits", "SystemExit: 0"),
        ("nested", "completion 0: the reward is [1.0], expected a number"),
        ("huge", "expected a finite number"),
        ("complex_numbers", "the reward is '1j', expected a number"),
    ],
)
def test_everything_wrong_is_an_error(judge: Any, function: str, message: str) -> None:
    with pytest.raises(RewardError) as raised:
        judge(function)
    assert message in str(raised.value)


@pytest.mark.parametrize("function", ["raises", "raises_later"])
def test_the_users_traceback_begins_in_their_file(judge: Any, function: str) -> None:
    said = (
        rf"^rewards\.py:{function} raised ZeroDivisionError: division by zero\nTraceback \(most recent call last\):\n"
    )
    with pytest.raises(RewardError, match=rf"{said}  File \"rewards\.py\", line \d+, in {function}\n"):
        judge(function)


def test_a_hang_is_ended(judge: Any) -> None:
    with pytest.raises(RewardError, match=r"did not return within 0\.5 s and was stopped"):
        judge("hangs", timeout_seconds=0.5)


def test_after_a_hang_a_new_process_serves_and_the_old_one_is_gone(context: LocalContext) -> None:
    reward = RewardFunction(config("hangs_on_empty", timeout_seconds=0.5), context.user_file("rewards.py"))
    first = int(reward(["x"], ["p"], [{}]).rewards[0])
    with pytest.raises(RewardError):
        reward([""], ["p"], [{}])
    assert not os.path.exists(f"/proc/{first}")
    second = int(reward(["x"], ["p"], [{}]).rewards[0])
    assert second != first
    reward.close()
    assert not os.path.exists(f"/proc/{second}")


def test_a_function_that_never_returns_ends_when_its_stage_is_killed(context: LocalContext) -> None:
    opening = {
        "file": str(context.user_file("rewards.py")), "function": "hangs", "shown": "rewards.py",
        "parameters": ["completions", "prompts", "rows"], "options": {}, "kind": "function", "form": "alignment",
    }  # fmt: skip
    command = [sys.executable, "-m", "rlhf_core.processes.function_process"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(opening) + "\n" + json.dumps({"batch": [["x"], ["p"], [{}]]}) + "\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == {"ready": True}
        child.stdin.close()  # as when the process at the other end is no more
        assert child.wait(30) == -signal.SIGKILL
    finally:
        child.kill()
        child.stdout.close()
        child.wait()


def test_it_can_be_sent_to_another_process(context: LocalContext) -> None:
    reward = RewardFunction(config("array"), context.user_file("rewards.py"))
    reward(["x"], ["p"], [{}])
    copy = pickle.loads(pickle.dumps(reward))
    assert copy(["x", "y"], ["p", "p"], [{}, {}]).rewards == [0.0, 1.0]
    copy.close()
    reward.close()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("length", "did you mean `lengths`?"),
        ("takes_two", "must take (completions, prompts, rows)"),
        ("other_names", "must take (completions, prompts, rows), by these names"),
        (
            "column",
            "missing a required argument: 'answer'; columns of the data are in `rows`, as rows[i]['answer'], or as",
        ),
        ("generator", "is a generator, because it has a `yield`: collect the values and return a list"),
        ("Judge", "is a class: give a function, or an object that can be called"),
    ],
)
def test_wrong_functions(judge: Any, function: str, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        judge(function)
    assert message in str(raised.value)
