"""Agents and environments that were written for OpenRLHF, TRL and verifiers play real episodes as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import Tokenizer, stop_token_ids
from rlhf_core.config.environments.environments import AgentEnvironment, ExecutorEnvironment
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.base_model import BaseModelConfig, ScratchModel
from rlhf_core.environments.agents.agent import AgentHost
from rlhf_core.environments.agents.executor import ExecutorHost
from rlhf_core.episodes.episode import EpisodeRules
from rlhf_core.episodes.programs import play_program
from rlhf_core.errors import EpisodeError, RecipeError
from rlhf_core.processes.user_process import UserFunction, UserProcess
from rlhf_core.rollout.engine import Request, SamplingParameters
from rlhf_core.stages import base, rl
from rlhf_core.stages.in_process import InProcessCluster, engine_in
from rlhf_core.types import Completion, Prompt, Trajectory
from tests.rlhf_core.environments.policies import completed, tokenizer_in
from tests.rlhf_core.rl.torch_engine import torch_engine
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import context_of, dataset

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("forked")]

FILES = Path(__file__).parent / "agents"
TURNS = 3
REPLY = 120  # tokens

SHOP = {"tool_parser": "hermes", "options": {"price": 4}}

Play = Callable[..., Trajectory]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("base"))


def host(tokenizer: Tokenizer, file: str, function: str, form: str, **settings: Any) -> AgentHost | ExecutorHost:
    given = {"path": file, "function": function, "form": form, "timeout_seconds": 120, **settings}
    if form == "openrlhf":
        return ExecutorHost(ExecutorEnvironment.model_validate({"type": "executor", **given}), FILES / file)
    return AgentHost(AgentEnvironment.model_validate({"type": "agent", **given}), FILES / file, tokenizer)


@pytest.fixture(scope="module")
def play(tokenizer: Tokenizer) -> Iterator[Play]:
    """Plays an episode in which the policy says `replies` in turn. Raises EpisodeError if it fails."""
    hosts: dict[tuple[str, ...], AgentHost | ExecutorHost] = {}

    def played(
        file: str, function: str, form: str, replies: list[str], row: dict[str, Any] | None = None, **settings: Any
    ) -> Trajectory:
        if (file, function) not in hosts:
            hosts[file, function] = host(tokenizer, file, function, form, **settings)
        sampling = SamplingParameters(1.0, 1.0, REPLY, stop_token_ids(tokenizer))
        rules = EpisodeRules(tokenizer, TURNS, 1500, sampling, file)
        said = iter(replies)

        async def ask(request: Request) -> Completion:
            return completed(tokenizer, next(said), request.parameters.max_tokens)

        async def episode() -> Trajectory:
            whole = {"id": "row", "prompt": [{"role": "user", "content": "a?"}], **(row or {})}
            program = hosts[file, function].new()
            try:
                prompt = Prompt("row", "a?", (1,), whole)
                return await play_program(program, prompt, rules, ask, seed=lambda n: n, environment_seed=0)
            finally:
                program.close()

        return asyncio.run(episode())

    yield played
    for each in hosts.values():
        each.close()


def text(tokenizer: Tokenizer, trajectory: Trajectory) -> str:
    return str(tokenizer.decode(trajectory.token_ids))


@pytest.mark.slow("the first one starts what all are forks of")
@pytest.mark.parametrize("function", ["AgentExecutor", "AgentInstance"])
def test_an_agent_of_openrlhf_reads_text_and_trains_what_was_sampled(
    play: Play, tokenizer: Tokenizer, function: str
) -> None:
    made = play("openrlhf_agent.py", function, "openrlhf", ["x", "ab"], {"answer": "b"})
    assert (made.environment_reward, made.turns, made.completion, made.branches) == (0.75, 2, "ab", ())
    assert (made.score, made.environment_metrics) == (1.0, {"steps": 2.0})
    # The feedback is appended as it is, untrained; what follows the last reply is left out.
    assert text(tokenizer, made) == "<user>user:a?<assistant>x<eos><user>user:no<assistant>ab<eos>"
    trained = made.token_ids[made.loss_mask]
    assert tokenizer.decode(trained) == "x<eos>ab<eos>"
    assert made.rollout_logprobs[made.loss_mask].tolist() == pytest.approx([-token / 100 for token in trained.tolist()])


def test_an_agent_of_openrlhf_ends_at_max_turns(play: Play) -> None:
    made = play("openrlhf_agent.py", "AgentExecutor", "openrlhf", ["x", "y", "z"], {"answer": "b"})
    assert (made.environment_reward, made.turns) == (-0.75, 3)


def test_an_executor_of_openrlhf_plays_on_tokens(play: Play, tokenizer: Tokenizer) -> None:
    made = play("openrlhf_executor.py", "AgentExecutor", "openrlhf", ["x", "b"], {"answer": "b"})
    assert (made.environment_reward, made.turns, made.score) == (1.0, 2, 1.0)
    assert text(tokenizer, made) == "<user>user:a?<assistant>x<eos><user>user:again<assistant>b<eos>"
    assert tokenizer.decode(made.token_ids[made.loss_mask]) == "x<eos>b<eos>"


def test_an_agent_of_openrlhf_chooses_the_temperature_of_its_next_turns(play: Play) -> None:
    made = play("openrlhf_agent.py", "Cooler", "openrlhf", ["x", "y", "b"], {"answer": "b"})
    assert made.temperatures is not None
    by_turn = made.temperatures[made.loss_mask].tolist()
    assert by_turn == pytest.approx([0.0] * 2 + [0.1] * 4)


@pytest.mark.parametrize(
    ("file", "function", "problem"),
    [
        ("openrlhf_executor.py", "Inventor", r"action_ranges has \(0, 3\), whose tokens the engine did not sample"),
        ("openrlhf_agent.py", "Penalising", r"sampling_params\.repetition_penalty is 1\.1: the run trains on"),
    ],
)
def test_what_was_not_sampled_as_the_run_samples_fails(play: Play, file: str, function: str, problem: str) -> None:
    with pytest.raises(EpisodeError, match=problem):
        play(file, function, "openrlhf", ["x", "y", "z"], {"answer": "b"})


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_an_environment_of_trl_is_tools_and_a_reward(play: Play, tokenizer: Tokenizer) -> None:
    replies = [called("buy", thing="tea", count=2), called("look"), "done"]
    row = {"budget": 10, "answer": "unused"}
    made = play("trl_environment.py", "Shop", "trl", replies, row, **SHOP)
    assert (made.environment_reward, made.turns, made.completion, made.branches) == (2.0, 3, "done", ())
    written = text(tokenizer, made)
    assert "user:a? you have 10" in written  # what `reset` returned
    assert '"description": "Buy things."' in written
    assert "tool:left 2" in written
    assert "tool:['tea', 'tea']" in written
    assert "get_reward" not in written
    assert [tokenizer.decode(made.token_ids[made.loss_mask]).count(each) for each in ("buy", "look", "left")] == [
        1,
        1,
        0,
    ]


def test_errors_of_trls_tools_are_read_by_the_policy_and_max_turns_ends(play: Play, tokenizer: Tokenizer) -> None:
    replies = [called("buy", thing="tea", count=9), called("steal"), called("buy", thing="tea")]
    made = play("trl_environment.py", "Shop", "trl", replies, {"budget": 3}, **SHOP)
    assert (made.environment_reward, made.turns) == (0.0, 3)  # of the last call, too, which was made
    assert "tool:{'error': 'too dear'}" in text(tokenizer, made)
    assert "tool:{'error': 'Tool steal not found.'}" in text(tokenizer, made)


def loaded(file: str, function: str, form: str, **options: Any) -> UserFunction:
    return UserFunction(FILES / file, function, file, (), options, "program", form)


@pytest.fixture(scope="module")
def process() -> Iterator[UserProcess]:
    """One that loads an agent after the other, as a plan does."""
    with closing(UserProcess(loaded("openrlhf_agent.py", "AgentExecutor", "openrlhf"))) as process:
        process.start()
        yield process


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (
            loaded("openrlhf_executor.py", "OfOldVersions", "openrlhf"),
            r"execute must take \(prompt, label, sampling_params, ",
        ),
        (loaded("openrlhf_agent.py", "AgentExecutor", "openrlhf", price=1), "must take its options .*'price'"),
        (
            loaded("trl_environment.py", "Shop", "openrlhf"),
            "must be a class with `execute`, as OpenRLHF's AgentExecutor",
        ),
        (loaded("trl_environment.py", "NoReset", "trl"), "NoReset has no method `reset`"),
        (loaded("trl_environment.py", "NoDocstring", "trl"), "NoDocstring.buy cannot be a tool: "),
        (loaded("trl_environment.py", "Shop", "verifiers"), "returned Shop, expected an environment of verifiers"),
    ],
    ids=lambda value: value.function if isinstance(value, UserFunction) else None,
)
def test_what_does_not_fit_its_form_is_refused_as_it_loads(
    process: UserProcess, wrong: UserFunction, problem: str
) -> None:
    with pytest.raises(RecipeError, match=problem):
        process.load(wrong)
    process.load(loaded("trl_environment.py", "Shop", "trl"))


def test_a_job_does_not_begin_with_an_agent_that_does_not_fit(tokenizer: Tokenizer) -> None:
    with pytest.raises(RecipeError, match="NoReset has no method `reset`"):
        host(tokenizer, "trl_environment.py", "NoReset", "trl", tool_parser="hermes")


def test_environments_of_trl_need_a_parser() -> None:
    with pytest.raises(ValueError, match="methods of TRL's environments are tools: set tool_parser"):
        AgentEnvironment.model_validate({"type": "agent", "path": "a.py", "form": "trl"})


@pytest.mark.parametrize(("replies", "reward"), [(["x", "abc"], 1.0), (["abc"], 1.5), (["x", "y"], 0.0)])
def test_an_environment_of_verifiers_plays_its_own_rollout(play: Play, replies: list[str], reward: float) -> None:
    pytest.importorskip("verifiers", "0.1.9", reason="a test dependency that cannot be declared beside openai 3")
    made = play("verifiers_environment.py", "load_environment", "verifiers", replies, {"answer": "abc"})
    assert (made.environment_reward, made.turns, made.completion) == (reward, len(replies), replies[-1])
    assert made.branches == ()


@pytest.mark.slow("trains with an engine")
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("transformers", marks=pytest.mark.endurance("mutations")),
        pytest.param("vllm", marks=pytest.mark.system),
    ],
)
def test_an_agent_of_openrlhf_trains_a_policy(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source = ScratchModel(
        type="scratch", words=(), hidden_size=64, intermediate_size=64, layers=2, heads=2, context_length=256
    )
    made = base.run(BaseModelConfig(source=source, dtype="float32"), {}, LocalContext(tmp_path / "base", given_seed=0))
    model = local_input(made.folder, Kind.BASE_MODEL)
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": letter} for i, letter in enumerate("ae")]
    inputs = {"model": model, "dataset": dataset(tmp_path / "questions", rows)}
    context = replace(context_of(tmp_path / "work", inputs), user_files_root=FILES)
    agent = {"type": "executor", "path": "openrlhf_agent.py", "function": "AgentExecutor", "form": "openrlhf"}
    settings = {
        "algorithm": "grpo", "dataset": "questions", "steps": 1, "prompts_per_step": 2, "sampling": {"max_tokens": 6},
        "rollout": {"max_length": 200, "repeatable": False, "cpu_cache_gib": 0.05, "max_sequences": 16},
        "engine": {"dtype": "float32", "zero_stage": 0},
        "environment": {**agent, "max_turns": 3, "timeout_seconds": 300},
        "grpo": {
            "rewards": {"game": {"type": "environment", "scored": True}}, "group_size": 4, "minibatches": 1,
            "optimizer": {"learning_rate": 1e-3, "schedule": "constant", "warmup_share": 0.0},
        },
    }  # fmt: skip
    opened = torch_engine if engine == "transformers" else partial(engine_in, request.getfixturevalue("engine_process"))
    rl.run(RLConfig.model_validate(settings), inputs, context, InProcessCluster(opened))
    ((_, metrics),) = context.logs
    assert metrics["trained_completions"] == 8
    assert 1 < metrics["reward/game/turns"] <= 3
    assert metrics["environment/steps"] == metrics["reward/game/turns"]
    assert 0 <= metrics["score"] <= 1
    assert -0.75 <= metrics["reward"] <= 1
    assert 0 <= metrics["rollout_mismatch"] < 1e-4  # the trainer's log-probs of all trained tokens are the engine's
