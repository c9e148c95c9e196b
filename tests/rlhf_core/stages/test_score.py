"""The stage score: rewards of completions that exist, by text and by reward models, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForSequenceClassification

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import ended_completion, load_tokenizer
from rlhf_core.config.stages.sampled import GenerateConfig
from rlhf_core.config.stages.score import ScoreConfig
from rlhf_core.contract import Input, Output
from rlhf_core.data.reading import read_rows
from rlhf_core.errors import RewardError, StageError
from rlhf_core.stages import generate, score
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.rl.torch_engine import torch_engine
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, dataset, no_cluster, reward_model

pytestmark = pytest.mark.parts

ENGINE = {"dtype": "float32", "zero_stage": 0}
EXACT = {"exact": {"type": "verifier", "weight": 2.0}}
MODELS = {
    "whole": {"type": "reward_model", "weight": 0.5},
    "again": {"type": "reward_model", "normalize": False},
    "steps": {"type": "process_reward_model", "separator": "a"},
}
PROMPTS = [{"prompt": [{"role": "user", "content": f"say {letter}"}], "answer": letter} for letter in "abc"]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": PROMPTS[0]["prompt"], "completions": [{"text": "a", "reward": 9.0}, {"text": "b"}]},
    {"prompt": PROMPTS[2]["prompt"], "completions": [{"text": "c"}, {"text": "cc"}, {"text": "abc"}]},
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    base = base_model(folder / "base")
    whole = reward_model(folder / "whole", base, seed=1, mean=0.5, std=2.0)
    return {
        "model": base, "prompts": dataset(folder / "prompts", PROMPTS),
        "rewards.whole.model": whole, "rewards.again.model": whole,
        "rewards.steps.model": reward_model(folder / "steps", base, seed=2, mean=-0.25, std=0.5),
    }  # fmt: skip


def settings(**changes: Any) -> ScoreConfig:
    return ScoreConfig.model_validate_json(json.dumps({"dataset": "d", "rewards": EXACT, **changes}))


def run(folder: Path, inputs: Mapping[str, Input], config: ScoreConfig, cluster: Any = no_cluster) -> Output:
    return score.run(config, inputs, context_of(folder, inputs), cluster)


def given(inputs: Mapping[str, Input], folder: Path, rows: list[dict[str, Any]], *names: str) -> dict[str, Input]:
    return {name: inputs[name] for name in names} | {"dataset": dataset(folder / "completions", rows)}


def test_text_is_judged_by_the_row_of_its_prompt(inputs: dict[str, Input], tmp_path: Path) -> None:
    with_prompts = given(inputs, tmp_path, COMPLETIONS, "prompts")
    context = context_of(tmp_path / "work", with_prompts)
    output = score.run(settings(prompts="p"), with_prompts, context, no_cluster)
    rows = read_rows(output.folder)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in COMPLETIONS]
    assert [[(e["text"], e["reward"], e["rewards"]) for e in row["completions"]] for row in rows] == [
        [("a", 2.0, {"exact": 1.0}), ("b", 0.0, {"exact": 0.0})],
        [("c", 2.0, {"exact": 1.0}), ("cc", 0.0, {"exact": 0.0}), ("abc", 0.0, {"exact": 0.0})],
    ]
    values = numpy.array([1.0, 0.0, 1.0, 0.0, 0.0])
    wanted = {
        "mean": values.mean(), "std": values.std(),
        "p05": numpy.percentile(values, 5), "p50": numpy.percentile(values, 50), "p95": numpy.percentile(values, 95),
    }  # fmt: skip
    suffixes = {"mean": "", **{name: f"_{name}" for name in wanted if name != "mean"}}
    expected = {f"reward/exact{suffixes[name]}": value for name, value in wanted.items()}
    expected |= {f"reward{suffixes[name]}": 2 * value for name, value in wanted.items()}
    assert output.metrics == pytest.approx({"rows": 2, "completions": 5, **expected})
    assert context.progresses[-1][:2] == (5, 5)
    whole = (output.folder / "data.arrow").read_bytes()
    parts = run(tmp_path / "parts", with_prompts, settings(prompts="p", rows_per_call=2))
    assert (parts.folder / "data.arrow").read_bytes() == whole


def test_verifiers_of_mathematics_and_of_code_judge_by_the_row(inputs: dict[str, Input], tmp_path: Path) -> None:
    """Rows whose `tests` differ in type, in one dataset."""
    code, pair = "def f(a, b): return a * b", {"input": [2, "x"], "output": "xx"}
    asked = [[{"role": "user", "content": text}] for text in ("half?", "double?", "repeat?")]
    prompts = [
        {"prompt": asked[0], "answer": "1/2", "tests": "assert False"},
        {"prompt": asked[1], "answer": code, "tests": ["assert f(1, 2) == 2", "assert f(2, 2) == 4"]},
        {"prompt": asked[2], "answer": code, "tests": [pair], "entry_point": "f"},
    ]
    texts = [[r"\boxed{0.5}", "0.4"], [code, "f = max"], [code, "f = max"]]
    rows = [
        {"prompt": turns, "completions": [{"text": t} for t in tried]}
        for turns, tried in zip(asked, texts, strict=True)
    ]
    given = {"dataset": dataset(tmp_path / "completions", rows), "prompts": dataset(tmp_path / "prompts", prompts)}
    rewards = {kind: {"type": "verifier", "kind": kind} for kind in ("math", "code_tests")}
    output = run(tmp_path / "work", given, settings(prompts="p", rewards=rewards))
    scored = [[e["rewards"] for e in row["completions"]] for row in read_rows(output.folder)]
    assert [each["math"] for each in scored[0]] == [1.0, 0.0]
    assert [[e["code_tests"] for e in row] for row in scored] == [[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]


def test_models_give_what_they_give_when_the_completions_are_sampled(inputs: dict[str, Input], tmp_path: Path) -> None:
    """In the very tokens that were sampled, of which some were cut."""
    sampled = {**inputs, "dataset": inputs["prompts"]}
    shared = {"dataset": "d", "rewards": MODELS, "engine": ENGINE}
    config = GenerateConfig.model_validate_json(
        json.dumps({**shared, "samples": 3, "sampling": {"max_tokens": 5}, "rollout": {"max_length": 24}})
    )
    context = context_of(tmp_path / "generate", sampled)
    made = generate.run(config, sampled, context, InProcessCluster(torch_engine))
    wanted = [entry for row in read_rows(made.folder) for entry in row["completions"]]
    assert "length" in {entry["finish_reason"] for entry in wanted}
    own = {name: item for name, item in inputs.items() if name != "prompts"}
    own["dataset"] = local_input(made.folder, Kind.DATASET)
    output = run(tmp_path / "score", own, settings(rewards=MODELS, engine=ENGINE, max_length=24), InProcessCluster())
    found = [entry for row in read_rows(output.folder) for entry in row["completions"]]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["rewards"] == pytest.approx(theirs["rewards"], abs=1e-5)
        assert ours["reward"] == pytest.approx(theirs["reward"], abs=1e-5)
        assert ours["token_ids"] == theirs["token_ids"]


def test_a_reward_model_is_read_at_the_end_of_the_last_reply(inputs: dict[str, Input], tmp_path: Path) -> None:
    """Against transformers in float64, of conversations of one and two rounds."""
    rounds = [{"role": "user", "content": "say a"}, {"role": "assistant", "content": "a"}]
    talks = [{"messages": rounds}, {"messages": [*rounds, {"role": "user", "content": "b"}, *rounds[1:]]}]
    with_talks = {
        "conversations": dataset(tmp_path / "talks", talks),
        "rewards.again.model": inputs["rewards.again.model"],
    }
    config = settings(dataset=None, conversations="t", rewards={"again": MODELS["again"]}, engine=ENGINE, max_length=64)
    output = run(tmp_path / "work", with_talks, config, InProcessCluster())
    folder = inputs["rewards.again.model"].folder
    tokenizer = load_tokenizer(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    for row, talk in zip(read_rows(output.folder), talks, strict=True):
        messages = talk["messages"]
        ids, _ = ended_completion(tokenizer, messages[:-1], messages[-1]["content"])
        with torch.no_grad():
            wanted = model.score(model.model(input_ids=torch.tensor([ids])).last_hidden_state)[0, -1, 0].item()
        assert row["prompt"] == messages[:-1]
        assert [entry["text"] for entry in row["completions"]] == ["a"]
        assert row["completions"][0]["reward"] == pytest.approx(wanted, abs=1e-5)


def test_a_reward_that_fails_ends_the_stage(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def reward(completions, prompts, rows):\n    return [float('nan')] * len(rows)\n")
    config = settings(rewards={"own": {"type": "function", "path": "own.py"}})
    completions = {"dataset": dataset(tmp_path / "completions", COMPLETIONS)}
    context = LocalContext(tmp_path / "work", user_files_root=tmp_path)
    with pytest.raises(RewardError, match="completion 0: the reward is nan, expected a finite number"):
        score.run(config, completions, context, no_cluster)


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (
            [{"prompt": [{"role": "user", "content": "x?"}], "completions": [{"text": "a"}]}],
            {"prompts": "p"},
            "row row0: its prompt is not in the dataset `prompts`",
        ),
        (
            COMPLETIONS,
            {"rewards": {"whole": MODELS["whole"]}, "max_length": 6, "engine": ENGINE},
            r"row row0: a completion with its prompt has \d+ tokens, more than max_length=6",
        ),
        (
            COMPLETIONS,
            {"rewards": {"whole": MODELS["whole"]}, "max_length": 5000, "engine": ENGINE},
            r"rewards\.whole: .*max_length",
        ),
    ],
)
def test_what_cannot_be_scored_is_an_error(
    inputs: dict[str, Input], tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    own = given(inputs, tmp_path, rows, "prompts", "rewards.whole.model")
    with pytest.raises(StageError, match=message):
        run(tmp_path / "work", own, settings(**changes), InProcessCluster())


def test_prompts_that_ask_the_same_with_other_answers_are_refused(inputs: dict[str, Input], tmp_path: Path) -> None:
    two = {"prompts": dataset(tmp_path / "two", [PROMPTS[0], {**PROMPTS[0], "answer": "b"}])}
    own = {**given(inputs, tmp_path, COMPLETIONS), **two}
    with pytest.raises(StageError, match="rows row0 and row1 of the dataset `prompts` ask the same"):
        run(tmp_path / "work", own, settings(prompts="p"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": {}}, "at least 1 item"),
        ({"conversations": "t"}, "one of them"),
        ({"dataset": None}, "one of them"),
        ({"max_length": 9}, "`rewards` has none of a model: remove it"),
        ({"rewards": {"whole": MODELS["whole"]}}, "max_length is missing"),
        ({"engine": ENGINE}, "engine is for models that read the completions, but there is no reward"),
        ({"seed": 3}, "seed: nothing is drawn at random here"),
        ({"rewards": {"exact": {"type": "verifier", "tolerated_failures": 0.5}}}, "every completion needs its reward"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**changes)


def test_reward_models_are_judged_on_pairs_in_the_format_of_reward_bench(
    inputs: dict[str, Input], tmp_path: Path
) -> None:
    """Against transformers in float64."""
    asked = [[{"role": "user", "content": f"say {letter}"}] for letter in "abc"]
    texts = [("a", "b"), ("bb", "c"), ("c", "a", "abc")]
    rows = [
        {"prompt": turns, "completions": [{"text": text} for text in of_row], "chosen": 1, "subset": subset}
        for turns, of_row, subset in zip(asked, texts, ("chat", "chat", "safety"), strict=True)
    ]
    own = {name: inputs[name] for name in ("rewards.whole.model", "rewards.again.model")}
    own["pairs"] = dataset(tmp_path / "pairs", rows)
    rewards = {name: MODELS[name] for name in ("again", "whole")}
    config = settings(dataset=None, pairs="p", rewards=rewards, engine=ENGINE, max_length=24)
    output = run(tmp_path / "work", own, config, InProcessCluster())

    folder = own["rewards.again.model"].folder
    tokenizer = load_tokenizer(folder)
    judge = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    by_row = []
    for turns, of_row in zip(asked, texts, strict=True):
        ids = [ended_completion(tokenizer, turns, text)[0] for text in of_row]
        with torch.no_grad():
            by_row.append([float(judge(torch.tensor([each])).logits[0, 0]) for each in ids])
    right = [float(chosen > max(rejected)) for chosen, *rejected in by_row]
    margins = [[chosen - each for each in rejected] for chosen, *rejected in by_row]
    assert output.kind is Kind.EVALUATION
    metrics = output.metrics
    assert metrics["accuracy"] == metrics["whole/accuracy"] == numpy.mean(right)
    assert metrics["accuracy/chat"] == numpy.mean(right[:2])
    assert metrics["accuracy/safety"] == right[2]
    assert metrics["margin"] == pytest.approx(numpy.mean([numpy.mean(each) for each in margins]), abs=1e-5)
    assert metrics["whole/margin"] == pytest.approx(metrics["margin"] / 2, abs=1e-5)  # its deviation is 2
    flat = numpy.array([margin for each in margins for margin in each])
    assert metrics["log_loss"] == pytest.approx(numpy.log1p(numpy.exp(-flat)).mean(), abs=1e-5)

    samples = [json.loads(line) for line in (output.folder / "samples.jsonl").read_text("utf-8").splitlines()]
    scores = [sample["completions"][0]["scores"] for sample in samples]
    assert scores == [{"again": value, "whole": value} for value in right]
    assert [sample["task"] for sample in samples] == ["chat", "chat", "safety"]
    assert samples[2]["rewards"]["again"] == pytest.approx(by_row[2], abs=1e-5)
    results = json.loads((output.folder / "results.json").read_text("utf-8"))
    assert sum(each["pairs"] for each in results["again"]["all"]["reliability"]) == 4


def test_pairs_make_no_dataset_and_stand_alone() -> None:
    assert settings(dataset=None, pairs="p").makes is None
    assert settings().makes == "dataset"
    with pytest.raises(ValidationError, match="or pairs by `pairs`: one of them"):
        settings(pairs="p")
