"""A debugger in the user's code, in processes of its own, at a real terminal; and what there is without one."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest

from tests.terminals import in_terminal

pytestmark = pytest.mark.parts

ROOT = Path(__file__).parents[3]
CODE = '''
def reward(completions, prompts, rows):
    breakpoint()
    return [1.5 for _ in completions]

class Environment:
    def step(self, reply):
        breakpoint()
        return {"reward": 2.5, "done": True}

def twice(number: int) -> int:
    """Doubles a number.

    Args:
        number: to double.
    """
    breakpoint()
    return 2 * number
'''
# Two episodes at a time; each call may take a second.
PROGRAM = """
import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path

from rlhf_core.config.environments.environments import FunctionEnvironment
from rlhf_core.config.rewards.rewards import FunctionReward
from rlhf_core.config.environments.tools import FunctionTool
from rlhf_core.environments.base import Reply
from rlhf_core.environments.function import FunctionHost, FunctionTools
from rlhf_core.errors import StageError
from rlhf_core.rewards.function import RewardFunction
from rlhf_core.system.terminal import lent_terminal

FILE = {"type": "function", "path": "own.py", "timeout_seconds": 1.0}
HERE = Path("own.py").absolute()

async def played(environments):
    async def one():
        episode = environments.new()
        await episode.reset({"prompt": []}, 0)
        feedback = await episode.step(Reply("a", "a"))
        episode.close()
        return feedback.reward
    return await asyncio.gather(one(), one())

async def called(tools):
    episode = tools.new()
    await episode.reset({"prompt": []}, 0)
    result = await episode.call("twice", {"number": 4})
    episode.close()
    return result.text

with lent_terminal() if sys.argv[1] == "lent" else nullcontext():
    try:
        print("rewards", RewardFunction(FunctionReward(**FILE), HERE)(["a"], ["b"], [{}]).rewards)
        print("episodes", asyncio.run(played(FunctionHost(FunctionEnvironment(**FILE), HERE))))
        print("tool", asyncio.run(called(FunctionTools(FunctionTool(**FILE, function="twice"), HERE))))
    except StageError as error:
        print("failed", error)
"""


def shown(folder: Path, how: str) -> str:
    (folder / "own.py").write_text(CODE)
    (folder / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}
    answers = itertools.cycle(["p 6 * 7", "import time; time.sleep(1.2)", "c"])
    command = [sys.executable, "program.py", how]
    status, text = in_terminal(command, folder, {**environment, "PYTHONPATH": str(ROOT)}, answers)
    assert status == 0, text
    return text


@pytest.mark.endurance("chaos")
def test_each_process_of_the_users_code_has_the_terminal_in_turn_and_no_time_limit(tmp_path: Path) -> None:
    text = shown(tmp_path, "lent")
    asked = [line for line in text.splitlines() if line.startswith("-> ")]
    assert asked == ["-> return [1.5 for _ in completions]"] + ['-> return {"reward": 2.5, "done": True}'] * 2 + [
        "-> return 2 * number"
    ]
    assert text.count("(Pdb) p 6 * 7\n42\n") == 4, "one prompt at a time"
    for said in ("rewards [1.5]", "episodes [2.5, 2.5]", "tool 8"):
        assert f"\n{said}\n" in text, text


def test_without_a_terminal_a_breakpoint_is_an_error_of_the_function(tmp_path: Path) -> None:
    assert "failed own.py:reward raised bdb.BdbQuit\n" in shown(tmp_path, "not lent")
