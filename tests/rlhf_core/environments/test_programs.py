"""Agents and executors of a Python file: episodes that they play, and how each of them can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.chat.encoding import Tokenizer, stop_token_ids
from rlhf_core.config.environments.environments import AgentEnvironment, ExecutorEnvironment
from rlhf_core.environments.agents.agent import AgentHost
from rlhf_core.environments.agents.executor import ExecutorHost
from rlhf_core.episodes.episode import EpisodeRules
from rlhf_core.episodes.programs import play_program
from rlhf_core.errors import EpisodeError, RecipeError
from rlhf_core.rollout.engine import Request, SamplingParameters
from rlhf_core.types import Completion, Prompt, Trajectory
from tests.rlhf_core.environments.policies import MOST_TOKENS, completed, tokenizer_in
from tests.rlhf_core.environments.test_function import wait_until

pytestmark = pytest.mark.parts

FILE = Path(__file__).with_name("playing.py")
TURNS = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def agents(tokenizer: Tokenizer) -> Iterator[AgentHost]:
    given = {
        "type": "agent",
        "path": "playing.py",
        "function": "agent",
        "options": {"price": 0.5},
        "timeout_seconds": 4,
    }
    environments = AgentHost(AgentEnvironment.model_validate(given), FILE, tokenizer)
    yield environments
    environments.close()


@pytest.fixture(scope="module")
def executors() -> Iterator[ExecutorHost]:
    given = {"type": "executor", "path": "playing.py", "function": "executor", "timeout_seconds": 4}
    environments = ExecutorHost(ExecutorEnvironment.model_validate(given), FILE)
    yield environments
    environments.close()


def play(environments: Any, tokenizer: Tokenizer, *answers: str) -> list[Trajectory | str]:
    """Side by side, of a row for each answer: the trajectory, or the error's text."""
    sampling = SamplingParameters(1.0, 1.0, MOST_TOKENS, stop_token_ids(tokenizer))
    rules = EpisodeRules(tokenizer, TURNS, 200, sampling, environments.name)

    async def ask(request: Request) -> Completion:
        prompt = str(tokenizer.decode(list(request.prompt)))
        if "wait" in prompt:
            await asyncio.Event().wait()
        if "slow" in prompt:
            await asyncio.sleep(3.5)
        return replace(completed(tokenizer, "abc", request.parameters.max_tokens), weight_version=7)

    async def episode(answer: str) -> Trajectory | str:
        program = environments.new()
        row = {"id": answer, "prompt": [{"role": "user", "content": "a?"}], "answer": answer}
        try:
            return await play_program(
                program, Prompt(answer, "a?", (1,), row), rules, ask, seed=lambda n: n, environment_seed=0
            )
        except EpisodeError as error:
            return str(error)
        finally:
            program.close()

    async def together() -> list[Trajectory | str]:
        return await asyncio.gather(*map(episode, answers))

    return asyncio.run(together())


def played(made: Trajectory | str) -> Trajectory:
    assert isinstance(made, Trajectory), made
    return made


def test_an_agent_earns_what_it_returns(agents: AgentHost, tokenizer: Tokenizer) -> None:
    fine, delegates = map(played, play(agents, tokenizer, "fine", "delegates"))
    assert (fine.environment_reward, fine.turns, fine.completion, fine.branches) == (2.5, 1, "abc", ())
    assert tokenizer.decode(fine.token_ids) == "<user>user:a?<assistant>abc<eos>"
    assert fine.messages == ({"role": "user", "content": "a?"},)
    assert (fine.weight_version, fine.finish_reason) == (7, "stop")
    assert (delegates.environment_reward, delegates.turns, len(delegates.branches)) == (1, 3, 2)
    asked = sorted(str(tokenizer.decode(branch.token_ids)) for branch in delegates.branches)
    assert asked == [f"<user>user:{letter}<assistant>abc<eos>" for letter in "xy"]


def test_an_agent_of_another_machine_gets_the_certificate_of_the_run(tokenizer: Tokenizer) -> None:
    network = {"listen": "127.0.0.1", "host": "localhost"}
    given = {"type": "agent", "path": "playing.py", "function": "agent_elsewhere", "network": network}
    environments = AgentHost(AgentEnvironment.model_validate(given), FILE, tokenizer)
    (made,) = play(environments, tokenizer, "x")
    environments.close()
    assert played(made).environment_reward == 1.0


def test_a_function_that_blocks_holds_up_no_other(tokenizer: Tokenizer) -> None:
    given = {"type": "agent", "path": "playing.py", "function": "blocking_agent"}
    environments = AgentHost(AgentEnvironment.model_validate(given), FILE, tokenizer)
    made = play(environments, tokenizer, "x", "y")
    environments.close()
    assert [played(each).environment_reward for each in made] == [3, 3]


@pytest.mark.endurance("chaos")
def test_waiting_for_replies_does_not_count(tokenizer: Tokenizer) -> None:
    given = {"type": "agent", "path": "playing.py", "function": "agent", "timeout_seconds": 3}
    environments = AgentHost(AgentEnvironment.model_validate(given), FILE, tokenizer)
    made = play(environments, tokenizer, "slow", "fine")
    environments.close()
    assert [played(each).turns for each in made] == [2, 1]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("nothing", "after 0 replies: it ended without a reply of the policy"),
        ("raises", "row raises, after 1 replies: it raised KeyError: 'no such move'\nTraceback"),
        ("hangs", "after 1 replies: it did not return within 4 s, waits for replies excluded"),
        ("dies", "before it answered, its process ended with status 4; see the log"),
        ("returns_text", "it returned the reward 'good', expected a finite number"),
        ("returns_nothing", "it returned the reward None, expected a finite number"),
        ("returns_infinity", "it returned the reward inf, expected a finite number"),
        ("returns_another_key", "it returned 'points'; what is read is `reward` and `score` and `metrics`"),
    ],
)
def test_an_agent_that_fails_is_named_and_touches_no_other(
    agents: AgentHost, tokenizer: Tokenizer, answer: str, problem: str
) -> None:
    first, failing, last = play(agents, tokenizer, "fine", answer, "fine")
    assert played(first).environment_reward == played(last).environment_reward == 2.5
    assert isinstance(failing, str)
    assert failing.startswith(f"environment playing.py:agent, row {answer}, ")
    assert problem in failing


def test_what_an_agent_leaves_ends_with_it(agents: AgentHost, tokenizer: Tokenizer) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    (made,) = play(agents, tokenizer, "leaves")
    assert (played(made).turns, played(made).environment_reward) == (1, 0.5)
    wait_until(lambda: {process.pid for process in psutil.Process().children(recursive=True)} <= before)


def test_an_executor_plays_on_tokens(executors: ExecutorHost, tokenizer: Tokenizer) -> None:
    fine, chooses, bounded = map(played, play(executors, tokenizer, "fine", "chooses", "asks_too_much"))
    assert tokenizer.decode(fine.token_ids) == "<user>user:a?<assistant>abc<eos>ba"
    assert fine.loss_mask.sum() == 5
    assert (fine.environment_reward, fine.turns, fine.finish_reason) == (0.25, 2, "length")
    assert tokenizer.decode(chooses.token_ids) == "<user>user:a?<assistant>ab"
    assert (chooses.turns, chooses.branches) == (1, ())
    assert (bounded.turns, len(bounded.branches)) == (4, 3)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("invents", "sequence 0 that it returned has other tokens as reply 0 than the engine sampled"),
        ("writes_nonsense", "its request to the policy is invalid: {'ask': 'generate'}"),
        ("nothing", "it ended without a reply of the policy"),
        ("unheard_of", "KeyError: 'executor_unheard_of'"),
    ],
)
def test_an_executor_that_fails_is_named(
    executors: ExecutorHost, tokenizer: Tokenizer, answer: str, problem: str
) -> None:
    failing, fine = play(executors, tokenizer, answer, "fine")
    assert played(fine).environment_reward == 0.25
    assert isinstance(failing, str)
    assert problem in failing


@pytest.mark.parametrize(
    ("function", "problem"),
    [("executor", r"must take \(row, base_url, api_key\)"), ("no_such", "there is no function `no_such`")],
)
def test_what_is_no_agent_is_refused(tokenizer: Tokenizer, function: str, problem: str) -> None:
    given = {"type": "agent", "path": "playing.py", "function": function}
    with pytest.raises(RecipeError, match=problem):
        AgentHost(AgentEnvironment.model_validate(given), FILE, tokenizer)
