"""The evaluation stage: its bookkeeping with the scripted engine, and the whole of it on a real one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import Tokenizer, load_tokenizer, stop_token_ids
from rlhf_core.config.base import result_settings
from rlhf_core.config.engines.rollout import SamplingConfig, VllmEngineConfig
from rlhf_core.config.stages.base_model import BaseModelConfig, ScratchModel
from rlhf_core.config.stages.evaluation import EvaluationConfig
from rlhf_core.contract import Input
from rlhf_core.data.prompts import to_prompts
from rlhf_core.episodes.rollouter import Rollouter
from rlhf_core.errors import RewardError, StageError
from rlhf_core.evaluation.answering import answer
from rlhf_core.evaluation.summary import Answered
from rlhf_core.rewards import build_reward, open_rewards
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages import base, evaluation
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.training.randomness import derived_seed
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import context_of, dataset

pytestmark = pytest.mark.parts

EXACT = {"type": "verifier", "kind": "exact"}
LENGTH = {"type": "function", "path": "scores.py", "function": "short"}
COMMON: dict[str, Any] = {
    "dataset": "held_out", "scorers": {"exact": EXACT, "short": LENGTH}, "samples": 4, "pass_at": [1, 2],
    "sampling": {"max_tokens": 4}, "rollout": {"max_length": 32, "cpu_cache_gib": 0.05, "cpus_per_engine": 0.5},
}  # fmt: skip
ROWS = [
    {"id": f"row{i}", "prompt": [{"role": "user", "content": f"say {word}"}], "answer": word, "task": task}
    for i, (word, task) in enumerate([("a", "first"), ("b", "first"), ("c", "second")])
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    source = ScratchModel(type="scratch", hidden_size=64, intermediate_size=64, layers=1, heads=2, context_length=64)
    output = base.run(
        BaseModelConfig(source=source, dtype="float32"), {}, LocalContext(tmp_path_factory.mktemp("base"))
    )
    return local_input(output.folder, Kind.POLICY)


@pytest.fixture
def context(tmp_path: Path) -> LocalContext:
    write_scorer(tmp_path, "[1.0 if len(c) <= 1 else 0.25 for c in completions]")
    return LocalContext(tmp_path / "work", user_files_root=tmp_path)


def write_scorer(folder: Path, values: str) -> None:
    (folder / "scores.py").write_text(f"def short(completions, prompts, rows):\n    return {values}\n")


def rollouter_of(engine: ScriptedEngine, tokenizer: Tokenizer) -> Rollouter:
    return Rollouter(InlineEngines(engine), tokenizer, VllmEngineConfig(max_length=64))


def settings(**changes: Any) -> EvaluationConfig:
    return EvaluationConfig.model_validate_json(json.dumps({**COMMON, **changes}))


def test_each_prompt_keeps_its_completions_greedy_first(model: Input, context: LocalContext) -> None:
    config, tokenizer = settings(), load_tokenizer(model.folder)
    prompts = to_prompts(ROWS, tokenizer, max_tokens=28)
    (stop,) = stop_token_ids(tokenizer)
    letters = {letter: tokenizer.convert_tokens_to_ids(letter) for letter in "abx"}

    first = derived_seed(0, "evaluation: prompt 0, sample 0")

    def script(prompt: Sequence[int], seed: int | None) -> list[int]:
        """Greedy: the right answer to the first prompt alone. Sampled: request 0 of all says b, the others x."""
        if seed is None:
            return [letters["a"], stop]
        return [letters["b"], stop] if seed == first else [letters["x"], letters["x"], stop]

    scorers = {name: build_reward(scorer, context) for name, scorer in config.scorers.items()}
    answered = answer(
        prompts,
        rollouter_of(ScriptedEngine(script), tokenizer).play,
        scorers,
        sampling=config.sampling,
        samples=config.samples,
        seed=0,
    )
    for scorer in scorers.values():
        scorer.close()

    assert [answer.greedy.scores["exact"] for answer in answered] == [1.0, 0.0, 0.0]
    assert [c.text for c in answered[0].sampled] == ["b", "xx", "xx", "xx"]
    assert [c.text for c in answered[2].sampled] == ["xx"] * 4
    assert [c.scores["short"] for c in answered[0].sampled] == [1.0, 0.25, 0.25, 0.25]
    assert [answer.task for answer in answered] == ["first", "first", "second"]
    assert answered[0].greedy.tokens == 2


def test_a_stop_text_ends_greedy_and_sampled_completions(model: Input) -> None:
    tokenizer = load_tokenizer(model.folder)
    ids = tokenizer.convert_tokens_to_ids(["a", "b", "x", "a"])
    rollouter = rollouter_of(ScriptedEngine(lambda *_: ids), tokenizer)
    sampling = SamplingConfig(max_tokens=4, stop=["bx"])
    answered = answer(
        to_prompts(ROWS[:1], tokenizer, max_tokens=28), rollouter.play, {}, sampling=sampling, samples=1, seed=0
    )
    of_each = [answered[0].greedy, *answered[0].sampled]
    assert [(each.text, each.tokens, each.finish_reason) for each in of_each] == [("abx", 3, "stop")] * 2


def test_equivalent_answers_are_scored(model: Input, context: LocalContext) -> None:
    tokenizer = load_tokenizer(model.folder)
    config = settings(scorers={"right": {"type": "verifier", "kind": "math", "pattern": "(.+)"}})
    prompts = to_prompts([row | {"answer": f"x={row['answer']}"} for row in ROWS], tokenizer, max_tokens=28)
    play = rollouter_of(ScriptedEngine(lambda *_: [tokenizer.convert_tokens_to_ids("b")]), tokenizer).play
    with open_rewards(config.scorers, context) as scorers:
        answered = answer(prompts, play, scorers, sampling=config.sampling, samples=1, seed=0)
    assert [[c.scores["right"] for c in (each.greedy, *each.sampled)] for each in answered] == [[0, 0], [1, 1], [0, 0]]


def test_the_part_that_a_prompt_is_in_changes_nothing(model: Input) -> None:
    config, tokenizer = settings(), load_tokenizer(model.folder)
    prompts = to_prompts(ROWS, tokenizer, max_tokens=28)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefgh"]
    play = rollouter_of(ScriptedEngine(lambda _, seed: [letters[(seed or 0) % 8]]), tokenizer).play

    def answered(first: int, last: int) -> list[Answered]:
        return answer(prompts[first:last], play, {}, sampling=config.sampling, samples=4, seed=0, first=first)

    assert [*answered(0, 1), *answered(1, 3)] == answered(0, 3)


def test_a_scorer_outside_0_to_1_fails_the_stage(model: Input, context: LocalContext, tmp_path: Path) -> None:
    write_scorer(tmp_path, "[-1.0] * len(completions)")
    config, tokenizer = settings(scorers={"short": LENGTH}), load_tokenizer(model.folder)
    prompts = to_prompts(ROWS, tokenizer, max_tokens=28)
    scorers = {name: build_reward(scorer, context) for name, scorer in config.scorers.items()}
    play = rollouter_of(ScriptedEngine(lambda *_: [5]), tokenizer).play
    with pytest.raises(RewardError, match=r"scorer short returned -1\.0"):
        answer(prompts, play, scorers, sampling=config.sampling, samples=0, seed=0)
    scorers["short"].close()


def test_more_passes_than_samples_are_refused_by_the_config() -> None:
    with pytest.raises(ValueError, match="pass@8 needs at least 8 samples of each prompt, but samples is 4"):
        settings(pass_at=[1, 8])
    assert settings(pass_at=[1], samples=0).samples == 0


def test_a_dtype_that_engines_do_not_serve_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float16"}')
    with pytest.raises(StageError, match="the model's dtype is 'float16'"):
        evaluation.stored_dtype(tmp_path)


def test_the_stage_on_a_real_engine(model: Input, in_process: InProcessCluster, tmp_path: Path) -> None:
    write_scorer(tmp_path, "[1.0 if len(c) <= 1 else 0.25 for c in completions]")
    too_long = {"prompt": [{"role": "user", "content": "x" * 30}], "answer": "x"}
    inputs = {"model": model, "dataset": dataset(tmp_path / "prompts", [*ROWS, too_long], "drop")}
    context = context_of(tmp_path / "work", inputs)
    context.user_files_root = tmp_path
    output = evaluation.run(settings(), inputs, context, in_process)

    assert output.kind is Kind.EVALUATION
    results = json.loads((output.folder / "results.json").read_text())
    lines = [json.loads(line) for line in (output.folder / "samples.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["say a", "say b", "say c"]
    assert [len(line["completions"]) for line in lines] == [5, 5, 5]
    assert results["all"]["sampled"]["completions"] == 12
    assert set(results["tasks"]) == {"first", "second"}
    assert results["all"]["scorers"]["exact"]["pass@1"]["value"] == output.metrics["pass@1"]
    passed = sum(line["completions"][0]["scores"]["short"] == 1.0 for line in lines)
    assert output.metrics["short/pass@1"] == passed / 3
    assert output.metrics["rows_dropped_too_long"] == 1
    assert {"pass@2_low", "pass@2_high", "diversity", "completion_length", "short/mean_score"} <= set(output.metrics)
    assert [(step, phase) for step, _, phase, _ in context.progresses] == [
        (0, "start engines"), (0, "greedy"), (0, "sampled"), (0, "scores"), (3, "scores"),
    ]  # fmt: skip


def test_of_an_episode_the_last_reply_is_scored_or_what_its_environment_gave(model: Input, tmp_path: Path) -> None:
    """Each is wrong at first, and says `b` then."""
    tokenizer = load_tokenizer(model.folder)

    def script(prompt: Sequence[int], seed: int | None) -> list[int]:
        said = tokenizer.decode(list(prompt))
        reply = "b" if "no" in said else "x"
        return [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    inputs = {"model": model, "dataset": dataset(tmp_path / "prompts", ROWS)}
    scorers = {"exact": EXACT, "solved": {"type": "environment"}}
    config = settings(scorers=scorers, environment={"type": "retry", "feedback": "no", "max_turns": 2})
    engine = ScriptedEngine(script, max_length=32)
    cluster = InProcessCluster(lambda *_: nullcontext(InlineEngines(engine)))
    output = evaluation.run(config, inputs, context_of(tmp_path / "work", inputs), cluster)
    lines = [json.loads(line) for line in (output.folder / "samples.jsonl").read_text().splitlines()]
    assert [{c["text"] for c in line["completions"]} for line in lines] == [{"b"}] * 3
    assert lines[1]["completions"][0]["messages"] == [
        *ROWS[1]["prompt"], {"role": "assistant", "content": "x"}, {"role": "user", "content": "no"},
    ]  # fmt: skip
    assert output.metrics["pass@1"] == output.metrics["solved/pass@1"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("reply", "note", "share"),
    [("", "note: all 15 completions are blank: ", 1.0), ("a", "note: all 15 completions are the same: a\n", None)],
)
def test_completions_that_are_all_blank_or_all_the_same_are_said(
    model: Input, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    reply: str, note: str, share: float | None,
) -> None:  # fmt: skip
    tokenizer = load_tokenizer(model.folder)
    tokens = [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    inputs = {"model": model, "dataset": dataset(tmp_path / "prompts", ROWS)}
    cluster = InProcessCluster(lambda *_: nullcontext(InlineEngines(ScriptedEngine(lambda *_: tokens, max_length=32))))
    run = context_of(tmp_path / "run", inputs)
    output = evaluation.run(settings(scorers={"exact": EXACT}), inputs, run, cluster)
    assert note in capsys.readouterr().out
    assert output.metrics.get("blank_share") == share


def test_an_environment_of_an_evaluation_changes_its_key_and_tolerates_nothing() -> None:
    assert "environment" not in result_settings(settings())
    assert result_settings(settings(environment={"type": "retry"}))["environment"]["max_turns"] == 4
    game = {"type": "function", "path": "game.py", "tolerated_failures": 0.1}
    with pytest.raises(
        ValueError, match=r"scorers\.game is the reward of an environment, but `environment` is single_turn"
    ):
        settings(scorers={"game": {"type": "environment"}})
    with pytest.raises(ValueError, match="without the episodes that fail, an evaluation would be of other prompts"):
        settings(environment=game)
