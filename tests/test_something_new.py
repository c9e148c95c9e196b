"""Where something new goes: one new file, its config, one line in a table. The example plugin has one of each kind.

`docs/design/extending.md` has the list that this follows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.algorithms import build_algorithm
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.chat.templates import SHIPPED
from rlhf_core.config.engines.rollout import RolloutEngineConfig
from rlhf_core.config.environments.environments import ToolsEnvironment
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.contract import Input
from rlhf_core.data.prompts import to_prompts
from rlhf_core.data.reading import read_rows
from rlhf_core.environments import Feedback, Reply, open_environments
from rlhf_core.environments.opening import InProcessHost
from rlhf_core.episodes.rollouter import Rollouter
from rlhf_core.errors import RecipeError
from rlhf_core.graph.outline import outline
from rlhf_core.losses.aggregation import loss_weights
from rlhf_core.pipeline.in_process import try_node
from rlhf_core.pipeline.prepare import prepare
from rlhf_core.preflight.look import preflight
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.rl.experience import pack_trajectories
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.rollout.engine import EngineSettings, Request, SamplingParameters, start_engine
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages import preference, rl
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.types import Minibatch, Scored
from tests.rlhf_core.chat.families import byte_level
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, dataset, pairs

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("example_plugin")]

SHORT = "rl.critic_grpo.rewards.short"
OPTIMIZER = {"learning_rate": 1e-2, "schedule": "constant", "warmup_share": 0.0}
RL: dict[str, Any] = {
    "algorithm": "critic-grpo", "dataset": "questions", "steps": 2, "prompts_per_step": 2,
    "sampling": {"max_tokens": 3}, "rollout": {"max_length": 40}, "engine": {"dtype": "float32", "zero_stage": 0},
    "probe_tolerance": 100.0, "environment": {"type": "guess", "max_turns": 3},
    "critic_grpo": {
        "rewards": {"short": {"type": "brevity", "limit": 1}, "guess": {"type": "environment", "weight": 2.0}},
        "group_size": 2, "optimizer": OPTIMIZER, "critic": {"optimizer": OPTIMIZER},
    },
}  # fmt: skip
RECIPE: dict[str, Any] = {
    "name": "new",
    "data": {
        "riddles": {"format": "riddles", "source": {"type": "files", "paths": ["riddles.jsonl"]}},
        "questions": {"format": "prompts", "source": {"type": "numbered", "size": 4}},
    },
    "base": {"source": {"type": "scratch", "hidden_size": 64, "layers": 1, "heads": 2, "context_length": 64}},
    "measure": {"dataset": "riddles", "max_length": 20},
    "rl": RL,
}
ROWS = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": "b"} for i in range(4)]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    riddles = [
        {"riddle": "What?", "answer": "a"},
        {"riddle": "What?", "answer": "a"},
        {"riddle": "Who?", "answer": "b"},
    ]
    (tmp_path / "riddles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in riddles))
    (tmp_path / "new.yaml").write_text(json.dumps(RECIPE))
    return str(tmp_path / "new.yaml")


def test_a_recipe_takes_all_of_them(recipe: str) -> None:
    loaded = load_recipe(recipe)
    nodes = outline(loaded.recipe).nodes
    assert nodes["measure"].inputs == {"dataset": "data.riddles", "model": "base"}
    assert nodes["rl"].inputs == {"dataset": "data.questions", "model": "base"}
    assert preflight(loaded) == []


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            f"{SHORT}.type=brevty",
            "there is no reward `brevty` (did you mean `brevity`?); there are reward_mo",
        ),
        (
            "rl.critic_grpo.rewards.short.limti=1",
            "unknown key `rl.critic_grpo.rewards.short.limti` (did you mean `limit`?)",
        ),
        (
            "rl.critic_grpo.rewards.short.limit=0",
            "`rl.critic_grpo.rewards.short.limit` is 0: it must be from 1 to 10000000",
        ),
        (f"{SHORT}={{limit: 1}}", f"`{SHORT}.type` is missing"),
        ("rl.environment.type=gues", "`rl.environment.type`: there is no environment `gues` (did you mean `guess`?)"),
        ("rl.environment.prize=1", "unknown key `rl.environment.prize` (did you mean `price`?)"),
        (
            "rl.environment={type: tools, parser: hermes, tools: {sum: {type: adder, amonut: 2}}}",
            "unknown key `rl.environment.tools.sum.amonut` (did you mean `amount`?)",
        ),
        (
            "data.questions.source.type=numberd",
            "there is no source `numberd` (did you mean `numbered`?); there are files",
        ),
        ("data.questions.source.size=0", "`data.questions.source.size` is 0: it must be from 1 to"),
        ("data.riddles.format=ridles", "`data.riddles.format`: there is no format `ridles` (did you mean `riddles`?)"),
        (
            "data.riddles.on_long_row=truncate",
            "on_long_row: a riddle that is cut has another answer",
        ),
        (
            "rl.rollout={type: constant, max_length: 40, tokn: 1}",
            "unknown key `rl.rollout.tokn` (did you mean `token`?)",
        ),
        ("rl.rollout={max_length: 40, token: 1}", "unknown key `rl.rollout.token`"),
        ("measur={}", "unknown key `measur` (did you mean `measure`?)"),
    ],
)
def test_a_mistake_in_them_is_told_as_in_those_of_the_package(recipe: str, override: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [override])
    assert sentence in str(caught.value)


def test_rows_of_the_format_are_checked_before_anything_runs(recipe: str) -> None:
    with pytest.raises(
        RecipeError, match=r"measure.dataset: `questions` has the format prompts, measure needs riddles"
    ):
        preflight(load_recipe(recipe, ["measure.dataset=questions"]))
    with pytest.raises(RecipeError, match=r"has 8 tokens, more than measure.max_length=5: .*\.on_long_row to drop$"):
        preflight(load_recipe(recipe, ["measure.max_length=5"]))


def test_checks_of_the_stage_are_called_before_anything_runs(recipe: str) -> None:
    with pytest.raises(RecipeError, match=r"^measure.max_length: no riddle is as short: raise it\n"):
        preflight(load_recipe(recipe, ["measure.max_length=3"]))
    (Path(recipe).parent / "riddles.jsonl").write_text(json.dumps({"riddle": "What?", "answer": "a"}))
    assert preflight(load_recipe(recipe)) == ["measure: there is one riddle to measure"]


def test_engines_are_checked_before_anything_runs_and_started_by_their_type(recipe: str) -> None:
    rollout = "rl.rollout={type: constant, max_length: 40, token: %d}"
    with pytest.raises(RecipeError, match=r"rl\.rollout: token is 9999, but the vocabulary has"):
        preflight(load_recipe(recipe, [rollout % 9999]))
    config = RolloutEngineConfig.chosen({"type": "constant", "max_length": 8, "token": 7})
    assert isinstance(config, RolloutEngineConfig)
    engine = start_engine(Path(), EngineSettings(config, "float32", seed=0))
    (completion,) = engine.generate([Request([1, 2], SamplingParameters(1.0, 1.0, 3, ()), seed=1)])
    assert list(completion.token_ids) == [7, 7, 7]


def test_the_stage_reads_the_format_in_jobs(
    recipe: str, local_store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ALIGNMENT_WORKDIR", str(tmp_path / "work"))
    prepared = prepare(recipe, [], store=local_store_url)
    measured = try_node(prepared, prepared.node("measure"), print)
    assert measured.manifest.metrics == {"longest": 8}  # <bos>, <user>, five characters, <assistant>
    riddles = prepared.repository.manifest(prepared.node("data.riddles").ref)
    assert riddles is not None
    assert riddles.metrics["duplicates"] == 1


def test_the_source_is_read_by_plans_and_jobs(
    recipe: str, local_store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ALIGNMENT_WORKDIR", str(tmp_path / "work"))
    assert preflight(load_recipe(recipe, ["rl.prompts_per_step=5"])) == [
        "rl: `questions` has 4 rows, fewer than prompts_per_step=5: a step has prompts more than once"
    ]
    prepared = prepare(recipe, [], store=local_store_url)
    node = prepared.node("data.questions")
    assert node.plugins == {"alignment-example": "1.0"}
    try_node(prepared, node, print)
    folder = prepared.repository.fetch(node.ref, tmp_path / "questions")
    assert sorted(row["prompt"][0]["content"] for row in read_rows(folder)) == ["0?", "1?", "2?", "3?"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    return {"model": base_model(folder / "base"), "dataset": dataset(folder / "prompts", ROWS)}


def guesses(inputs: Mapping[str, Input]) -> ScriptedEngine:
    """Guesses "c", and "b" when told `down`; with an odd seed first "a", and "c" when told `up`."""
    tokenizer = load_tokenizer(inputs["model"].folder)

    def script(prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        assert seed is not None
        said = tokenizer.decode(list(prompt))
        reply = ("b" if "down" in said and "up" not in said else "c") if seed % 2 == 0 or "up" in said else "a"
        return [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    return ScriptedEngine(script, max_length=40)


def test_algorithm_reward_and_environment_train(inputs: dict[str, Input], tmp_path: Path) -> None:
    engine = guesses(inputs)
    context = context_of(tmp_path / "work", inputs)
    rl.run(
        RLConfig.model_validate(RL), inputs, context, InProcessCluster(lambda *_: nullcontext(InlineEngines(engine)))
    )
    assert [version for _, version in engine.loaded] == [1, 2]
    for _, metrics in context.logs:
        assert metrics["reward"] == pytest.approx(metrics["reward/short"] + 2 * metrics["reward/guess"])
        assert metrics["reward/short"] == 1.0
        assert 1.0 < metrics["reward/guess/turns"] <= 3.0
        assert 0 <= metrics["environment/wrong_guesses"] - (metrics["reward/guess/turns"] - 1) <= 1
        assert metrics["value_loss"] > 0


@pytest.mark.endurance("architectures")
@pytest.mark.slow("RL with vLLM's parsers")
def test_the_tool_answers_the_policy(tmp_path: Path) -> None:
    async def play(environment: Any, *numbers: int) -> list[Any]:
        await environment.reset(ROWS[0], 0)
        calls = [f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'number': n}})}</tool_call>" for n in numbers]
        return [await environment.step(Reply(call, call)) for call in calls]

    given = {"type": "tools", "parser": "hermes", "tools": {"sum": {"type": "adder", "amount": 2}}}
    tokenizer = byte_level(SHIPPED["chatml"].text)
    with open_environments(ToolsEnvironment.model_validate(given), context_of(tmp_path, {}), tokenizer) as environments:
        assert [tool["function"]["name"] for tool in environments.tools] == ["add"]
        said = asyncio.run(play(environments.new(), 1, 40))
    assert said == [
        Feedback([{"role": "tool", "name": "add", "content": text}], metrics={"tool_calls": 1}) for text in ("3", "42")
    ]


def test_the_preference_loss_trains(inputs: dict[str, Input], tmp_path: Path) -> None:
    given = {"model": inputs["model"], "dataset": dataset(tmp_path / "pairs", pairs(8))}
    settings = {
        "batch_size": 8,
        "max_steps": 20,
        "epochs": 20,
        "max_length": 40,
        "log_every": 1,
        "engine": RL["engine"],
    }
    config = PreferenceConfig.model_validate(
        {"dataset": "d", "losses": {"far": {"type": "apart", "aim": 2.0}}, "optimizer": OPTIMIZER, **settings}
    )
    context = context_of(tmp_path / "work", given)
    preference.run(config, given, context, InProcessCluster())
    gaps = [metrics["chosen_logprob"] - metrics["rejected_logprob"] for _, metrics in context.logs]
    assert abs(gaps[0] - 2.0) > 1.0
    assert gaps[-1] == pytest.approx(2.0, abs=0.5)
    with pytest.raises(ValueError, match=r"there is no preference loss `apartt` \(did you mean `apart`"):
        PreferenceConfig.model_validate({**config.model_dump(), "losses": {"far": {"type": "apartt"}}})


@pytest.mark.slow("RL with vLLM's parsers")
def test_what_the_environment_says_trains_nothing(inputs: dict[str, Input]) -> None:
    """The gradient of the loss with respect to the log-prob of each token, in episodes of several turns."""
    from alignment_example.environment import Guess

    config, tokenizer = RLConfig.model_validate(RL), load_tokenizer(inputs["model"].folder)
    prompts = to_prompts([{"id": str(i), **row} for i, row in enumerate(ROWS)], tokenizer, max_tokens=30)
    environment_host = InProcessHost(config.environment, Guess)
    rollouter = Rollouter(InlineEngines(guesses(inputs)), tokenizer, config.rollout, environment_host)
    trajectories = [t for group in RolloutSampler(config, rollouter, 0).sample(prompts, 0) for t in group]
    assert max(t.turns for t in trajectories) > 1
    scored = Scored(**vars(pack_trajectories(trajectories)))
    algorithm = build_algorithm(config)
    rewards = torch.arange(float(len(trajectories)))
    batch = algorithm.advantages(scored, rewards, torch.arange(len(prompts)).repeat_interleave(2), 0.0)
    weights = loss_weights(batch.loss_mask, batch.sequence_lengths, "token", length=1)
    logprobs = torch.full((batch.num_tokens,), -1.0, requires_grad=True)
    loss, _ = algorithm.policy_loss(logprobs, None, Minibatch(**vars(batch), loss_weights=weights), 0.0)
    loss.backward()
    assert logprobs.grad is not None
    policy = [mask for t in trajectories for mask in said_by_policy(tokenizer, t.token_ids.tolist())]
    assert (logprobs.grad != 0).tolist() == policy
    assert batch.returns is not None
    assert bool((batch.returns[~torch.tensor(policy)] == 0).all())


def said_by_policy(tokenizer: Any, token_ids: Sequence[int]) -> list[bool]:
    """What stands between <assistant> and <eos>, with <eos>, as a person reads an episode."""
    inside, said = False, []
    for token in tokenizer.convert_ids_to_tokens(token_ids):
        said.append(inside)
        inside = token == "<assistant>" or (inside and token != "<eos>")
    return said
