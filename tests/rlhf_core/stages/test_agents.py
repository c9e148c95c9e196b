"""Agents and executors through the stages: what is trained and evaluated is what the engine sampled for them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import Tokenizer, load_tokenizer
from rlhf_core.config.engines.rollout import SamplingConfig, VllmEngineConfig
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.base_model import BaseModelConfig, ScratchModel
from rlhf_core.config.stages.evaluation import EvaluationConfig
from rlhf_core.contract import Input
from rlhf_core.environments import EnvironmentHost, Program
from rlhf_core.environments.agents.api.server import PolicyServer
from rlhf_core.environments.agents.program import Outcome, Policy
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.errors import EpisodeError
from rlhf_core.rl.experience import pack_trajectories
from rlhf_core.rollout.engine import Request
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages import base, evaluation, rl
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.types import Branch, Completion, Prompt, Trajectory
from tests.rlhf_core.rl.one_rank import rl_config, trainer
from tests.rlhf_core.rl.torch_engine import TorchEngine
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import context_of, dataset

pytestmark = pytest.mark.parts

# The default is for the suite; more take seconds for each ten.
EPISODES = int(os.environ.get("ALIGNMENT_RANDOM_EPISODES", "100"))

# Asks twice, side by side, and once more after what it was told. A row whose answer is `x` has no game.
AGENT = """
import asyncio
import aiohttp

async def run(row, base_url, api_key, price):
    if row["answer"] == "x":
        raise LookupError("there is no such game")
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        async def ask(*messages):
            body = {"model": "policy", "messages": messages}
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                response.raise_for_status()
                return (await response.json())["choices"][0]["message"]
        question = row["prompt"][0]
        first, _ = await asyncio.gather(ask(question), ask({"role": "user", "content": "7"}))
        said = {"role": "assistant", "content": first["content"]}
        last = await ask(question, said, {"role": "user", "content": "not"})
    return {"reward": (last["content"] == row["answer"]) - price}
"""
EXECUTOR = """
async def run(engine, row):
    prompt = await engine.encode(row["prompt"])
    replies = [await engine.generate(prompt) for _ in range(2)]
    best = next((reply for reply in replies if reply.text == row["answer"]), replies[0])
    return {"reward": float(best.text == row["answer"]), "sequences": [[prompt, best]]}
"""
RL: dict[str, Any] = {
    "algorithm": "grpo", "dataset": "questions", "steps": 2, "prompts_per_step": 2, "sampling": {"max_tokens": 3},
    "rollout": {"max_length": 40, "repeatable": False}, "engine": {"dtype": "float32", "zero_stage": 0},
    "probe_tolerance": 100.0,
    "grpo": {
        "rewards": {"game": {"type": "environment"}}, "group_size": 2, "minibatches": 2,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant", "warmup_share": 0.0},
    },
}  # fmt: skip
OF_AGENT = {"type": "agent", "path": "playing.py", "options": {"price": 0.25}, "max_turns": 3}
OF_EXECUTOR = {"type": "executor", "path": "playing.py"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    """A Llama of 2 layers, with a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("base")
    source = ScratchModel(
        type="scratch", words=(), hidden_size=32, intermediate_size=64, layers=2, heads=2, context_length=256
    )
    output = base.run(BaseModelConfig(source=source, dtype="float32"), {}, LocalContext(folder, given_seed=0))
    return local_input(output.folder, Kind.BASE_MODEL)


def prepared(folder: Path, model: Input, code: str, answers: str) -> tuple[dict[str, Input], LocalContext, Any]:
    """Every prompt is answered `a`, by odd seeds `b`, and `b` once an `a` was wrong."""
    tokenizer = load_tokenizer(model.folder)

    def script(prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        reply = "b" if "not" in tokenizer.decode(list(prompt)) or (seed or 0) % 2 else "a"
        return [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": each} for i, each in enumerate(answers)]
    inputs = {"model": model, "dataset": dataset(folder / "questions", rows)}
    inputs["validation.dataset"] = inputs["dataset"]
    (folder / "playing.py").write_text(code)
    context = replace(context_of(folder / "work", inputs), user_files_root=folder)
    return (
        inputs,
        context,
        InProcessCluster(lambda *_: nullcontext(InlineEngines(ScriptedEngine(script, max_length=40)))),
    )


def train(folder: Path, model: Input, code: str, answers: str, environment: Mapping[str, Any]) -> LocalContext:
    inputs, context, cluster = prepared(folder, model, code, answers)
    validation = {"dataset": "questions", "every_steps": 1, "scorers": {"exact": {"type": "verifier"}}}
    settings = {**RL, "environment": environment, "validation": validation if "x" not in answers else None}
    rl.run(RLConfig.model_validate(settings), inputs, context, cluster)
    return context


def test_an_agents_episodes_train_and_validate(model: Input, tmp_path: Path) -> None:
    context = train(tmp_path, model, AGENT, "bb", OF_AGENT)
    assert len(context.logs) == 2
    for _, metrics in context.logs:
        assert metrics["reward/game/turns"] == 3
        assert metrics["reward"] == 0.75
        assert metrics["completion_length"] == 6
        assert metrics["validation/pass@1"] == 1.0  # of the last reply
        assert metrics["trained_completions"] == 4
        assert metrics["rollout_mismatch"] > 0  # of a scripted engine, whose log-probs are those of no model


@pytest.mark.endurance("architectures")
def test_failures_of_agents_are_tolerated_as_the_recipe_says(model: Input, tmp_path: Path) -> None:
    with pytest.raises(
        EpisodeError,
        match=r"environment playing.py:run, row \w+, after 0 replies: it raised LookupError: .+\nTraceback",
    ):
        train(tmp_path, model, AGENT, "bx", OF_AGENT)
    context = train(tmp_path / "again", model, AGENT, "bx", {**OF_AGENT, "tolerated_failures": 0.5})
    assert [metrics["environment/failures"] for _, metrics in context.logs] == [2, 2]


def test_an_executors_episodes_train(model: Input, tmp_path: Path) -> None:
    context = train(tmp_path, model, EXECUTOR, "ab", OF_EXECUTOR)
    for _, metrics in context.logs:
        assert metrics["completion_length"] == 2  # of the reply that it chose
        assert metrics["reward/game/turns"] == 1


def test_an_evaluation_scores_the_last_reply(model: Input, tmp_path: Path) -> None:
    inputs, context, cluster = prepared(tmp_path, model, AGENT, "ba")
    settings = {
        "dataset": "questions", "scorers": {"exact": {"type": "verifier"}}, "sampling": {"max_tokens": 3},
        "samples": 0, "pass_at": (1,), "environment": OF_AGENT, "rollout": RL["rollout"],
    }  # fmt: skip
    output = evaluation.run(EvaluationConfig.model_validate(settings), inputs, context, cluster)
    assert output.metrics["pass@1"] == 0.5


class Recording(TorchEngine):
    """Keeps what it has sampled."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, max_length=250)
        self.sampled: dict[tuple[int, ...], list[Completion]] = {}

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        completions = super().generate(requests)
        for request, completion in zip(requests, completions, strict=True):
            self.sampled.setdefault(tuple(request.prompt), []).append(completion)
        return completions


class RandomAgent(Program):
    """Continues any of its conversations, begins others, changes what was said, and asks several things at a time."""

    def __init__(self, server: PolicyServer) -> None:
        self._server = server
        self._known: list[list[dict[str, Any]]] = [[]]

    async def run(self, row: Mapping[str, Any], seed: int, policy: Policy) -> Outcome:
        rng = random.Random(seed)
        async with (
            self._server.episode(policy) as (url, key),
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        ):
            for _ in range(rng.randint(1, 4)):
                at_once = rng.choice([1, 1, 2])
                await asyncio.gather(*(self._ask(session, url, rng, policy) for _ in range(at_once)))
        return Outcome(rng.random())

    def close(self) -> None:
        pass

    async def _ask(self, session: aiohttp.ClientSession, url: str, rng: random.Random, policy: Policy) -> None:
        settings: dict[str, Any] = {"model": "policy", "max_tokens": rng.randint(1, policy.max_tokens)}
        if rng.random() < 0.3:
            settings["stop"] = [rng.choice("aeiou")]
        if rng.random() < 0.2:
            prompt = [rng.randrange(len(policy.tokenizer)) for _ in range(rng.randint(1, 5))]
            async with session.post(f"{url}/completions", json={**settings, "prompt": prompt}) as response:
                response.raise_for_status()
            return
        before = rng.choice(self._known)
        if before and rng.random() < 0.1:
            before = [*before[:-1], {"role": "assistant", "content": "another reply"}]
        messages = [*before, {"role": "user", "content": "".join(rng.choices("abc ?", k=rng.randint(1, 4)))}]
        settings["n"] = rng.choice([1, 1, 1, 2])
        async with session.post(f"{url}/chat/completions", json={**settings, "messages": messages}) as response:
            response.raise_for_status()
            choices = (await response.json())["choices"]
        for choice in choices:
            message = {"role": "assistant", "content": choice["message"]["content"] or ""}
            self._known.append([*messages, message])


class RandomAgentHost(EnvironmentHost):
    name, max_turns, tolerated_failures = "random", 20, 0.0

    def __init__(self) -> None:
        self._server = PolicyServer()

    def new(self) -> RandomAgent:
        return RandomAgent(self._server)

    def close(self) -> None:
        pass


def random_episodes(model: Input, tokenizer: Tokenizer) -> tuple[list[Trajectory], Recording]:
    engine = Recording(model.folder)
    config = VllmEngineConfig(max_length=250, repeatable=False)
    rollouter = Rollouter(InlineEngines(engine), tokenizer, config, RandomAgentHost())
    prompt = Prompt("row", "a", (1,), {"id": "row", "prompt": []})

    def start(number: int) -> Start:
        return Start(prompt, lambda call: 1000 * number + call, environment_seed=number)

    played: list[Trajectory] = []
    for first in range(0, EPISODES, 100):  # the engine is slow, and clients have time limits
        starts = [start(number) for number in range(first, min(first + 100, EPISODES))]
        played += rollouter.play(starts, SamplingConfig(max_tokens=6))
    return played, engine


@pytest.mark.timeout(600 + 2 * EPISODES)
def test_every_token_of_random_episodes_is_trained_once_as_it_was_sampled(model: Input, tmp_path: Path) -> None:
    trajectories, engine = random_episodes(model, load_tokenizer(model.folder))
    assert len(trajectories) == EPISODES
    found = sum(len(of_prompt) for of_prompt in engine.sampled.values())
    assert sum(trajectory.turns for trajectory in trajectories) == found
    runs = [run for trajectory in trajectories for each in trajectory.sequences for run in _sampled_runs(each)]
    # The longest first: one that was stopped may be the beginning of another after the same prompt.
    for prompt, tokens, logprobs in sorted(runs, key=lambda run: -len(run[1])):
        same = [
            made
            for made in engine.sampled[prompt]
            if tuple(made.token_ids[: len(tokens)]) == tokens
            and torch.equal(torch.tensor(made.logprobs[: len(tokens)]), logprobs)
        ]
        assert same
        engine.sampled[prompt].remove(same[0])
    assert not any(engine.sampled.values())
    assert sum(len(each) > 1 for each in map(_sampled_runs, trajectories)) > EPISODES / 10
    assert sum(len(trajectory.branches) > 0 for trajectory in trajectories) > EPISODES / 3
    _check_trainer(trajectories, model, tmp_path)


def _sampled_runs(sequence: Trajectory | Branch) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """What is trained: of each reply the tokens before it, its own, and their log-probs."""
    tokens, mask = sequence.token_ids.tolist(), sequence.loss_mask.tolist()
    starts = [i for i in range(1, len(tokens)) if mask[i] and not mask[i - 1]]
    ends = [i + 1 for i in range(1, len(tokens)) if mask[i] and not any(mask[i + 1 : i + 2])]
    return [
        (tuple(tokens[:start]), tuple(tokens[start:end]), sequence.rollout_logprobs[start:end])
        for start, end in zip(starts, ends, strict=True)
    ]


def _check_trainer(trajectories: Sequence[Trajectory], model: Input, folder: Path) -> None:
    """The log-probs that the trainer computes of all sequences, packed in trees, are those of the engine."""
    engine = {"dtype": "float32", "zero_stage": 0, "tokens_per_micro_batch": 2048}
    ours, _ = trainer(rl_config("grpo", minibatches=2, engine=engine), model, folder)
    scored = ours.score(pack_trajectories(trajectories))
    assert scored.old_logprobs is not None
    trained = scored.loss_mask
    difference = (scored.old_logprobs[trained] - scored.rollout_logprobs[trained]).abs().max()
    print(f"{len(trajectories)} episodes, {scored.num_sequences} sequences, {int(trained.sum())} trained tokens; "
          f"largest difference of log-probs {float(difference):.1e}")  # fmt: skip
    assert difference < 1e-4
