"""What lm-evaluation-harness gets from engines, and what is made of its results, with a float64 model as the oracle."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import Tokenizer, encode_prompt, load_tokenizer
from rlhf_core.contract import Input
from rlhf_core.errors import StageError
from rlhf_core.evaluation.harness.records import flat_metrics
from rlhf_core.evaluation.intervals import cluster_bootstrap
from rlhf_core.evaluation.stored import write_evaluation
from rlhf_core.evaluation.verdict import Criterion, judge
from tests.rlhf_core.evaluation.harness.task_files import (
    CHOICE,
    READ,
    ROWS,
    SAY,
    Float64Engine,
    evaluated,
    settings,
    task_folder,
)
from tests.rlhf_core.stages.supervised_runs import base_model

pytestmark = pytest.mark.parts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return base_model(tmp_path_factory.mktemp("base"), seed=3)


@pytest.fixture(scope="module")
def tokenizer(model: Input) -> Tokenizer:
    return load_tokenizer(model.folder)


@pytest.fixture
def engine(model: Input) -> Float64Engine:
    return Float64Engine(model.folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task folder, from which tasks name their data."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "tasks").mkdir()
    monkeypatch.chdir(tmp_path / "tasks")
    return tmp_path / "tasks"


def test_choices_have_the_log_probs_of_a_float64_model_and_the_metrics_that_follow(
    model: Input, tokenizer: Tokenizer, engine: Float64Engine, folder: Path
) -> None:
    task_folder(folder, choice=CHOICE)
    rows, results = evaluated(settings("choice"), folder, engine, model.folder)
    # One pass over the choices, and one greedy continuation of each question.
    assert engine.calls == [("logprobs", 18), ("generate", 4)]
    assert [row["id"] for row in rows] == [f"choice/{n}" for n in range(6)]

    expected: dict[str, list[float]] = {"acc": [], "acc_norm": [], "exact_match": []}
    for row, data in zip(rows, ROWS, strict=True):
        context = tokenizer(data["question"])["input_ids"]
        sums, flags = [], []
        for choice, request in zip(data["choices"], row["requests"], strict=True):
            assert request["text"] == f" {choice}"
            tokens = tokenizer(f"{data['question']} {choice}")["input_ids"][len(context) :]
            sums.append(math.fsum(engine.continuation(context, tokens)))
            flags.append(engine.greedy(context, len(tokens)) == tokens)
            assert request["logprob"] == pytest.approx(sums[-1], abs=1e-10)
            assert request["greedy"] == flags[-1]
        by_length = [total / len(choice) for total, choice in zip(sums, data["choices"], strict=True)]
        right = [np.argmax(sums) == data["gold"], np.argmax(by_length) == data["gold"], flags[data["gold"]]]
        for values, value in zip(expected.values(), right, strict=True):
            values.append(float(value))
        (completion,) = row["completions"]
        assert completion["scores"] == {f"choice.{name}": values[-1] for name, values in expected.items()}
        assert completion["text"] == f" {data['choices'][np.argmax(sums)]}"
    metrics = flat_metrics(results)
    assert sum(expected["acc"][3:]) == 1
    for name, values in expected.items():
        interval = cluster_bootstrap(values, seed=0)
        measured = [metrics[f"choice.{name}{end}"] for end in ("", "_low", "_high")]
        assert measured == [interval.value, interval.low, interval.high]
    assert metrics["prompts"] == 6


def test_a_greedy_choice_is_known(model: Input, tokenizer: Tokenizer, engine: Float64Engine, folder: Path) -> None:
    (likeliest,) = engine.greedy(tokenizer("say a")["input_ids"], 1)
    choices = [tokenizer.decode([likeliest]), "zz"]
    task_folder(folder, [{"question": "say a", "choices": choices, "gold": 0}], choice=f'{CHOICE}target_delimiter: ""')
    rows, results = evaluated(settings("choice"), folder, engine, model.folder)
    assert [request["greedy"] for request in rows[0]["requests"]] == [True, False]
    assert results["tasks"]["choice"]["exact_match"]["value"] == 1


def test_completions_end_at_the_stop_text_and_each_filter_has_a_score(
    model: Input, tokenizer: Tokenizer, engine: Float64Engine, folder: Path
) -> None:
    task_folder(folder, say=SAY)
    rows, results = evaluated(settings("say"), folder, engine, model.folder)
    first, whole = [], []
    for row, data in zip(rows, ROWS, strict=True):
        ids = engine.greedy(tokenizer(data["question"])["input_ids"], 4, [tokenizer.eos_token_id])
        text = tokenizer.decode(ids, skip_special_tokens=True).partition("b")[0]
        (completion,) = row["completions"]
        assert (completion["text"], completion["tokens"]) == (text, len(ids))
        answer = data["choices"][data["gold"]]
        found = next((letter for letter in text if letter.islower()), "[invalid]")
        first.append(float(found == answer))
        whole.append(float(text == answer))
        assert completion["scores"] == {"say.exact_match.first": first[-1], "say.exact_match.whole": whole[-1]}
    assert results["tasks"]["say"]["exact_match.first"]["value"] == np.mean(first)
    assert results["tasks"]["say"]["exact_match.whole"]["value"] == np.mean(whole)


def test_a_document_is_read_in_windows_and_its_perplexity_is_no_score(
    model: Input, tokenizer: Tokenizer, engine: Float64Engine, folder: Path
) -> None:
    """Windows of 9 tokens, with the first of which nothing predicts: 8 new ones each, and fewer in the last."""
    task_folder(folder, read=READ)
    rollout = {"max_length": 9, "cpu_cache_gib": 0.05, "cpus_per_engine": 0.5}
    rows, results = evaluated(settings("read", max_tokens=2, rollout=rollout), folder, engine, model.folder)
    texts = [f"{row['question']} {row['question']}" for row in ROWS]
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    total = 0.0
    for text in texts:
        ids = [prefix, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        for start in range(1, len(ids), 8):
            end = min(start + 8, len(ids))
            total += sum(engine.continuation(ids[max(0, end - 9) : start], ids[start:end]))
    words, bytes_ = sum(len(text.split()) for text in texts), sum(map(len, texts))
    measured = results["tasks"]["read"]
    assert measured["word_perplexity"]["value"] == pytest.approx(math.exp(-total / words), rel=1e-10)
    assert measured["bits_per_byte"]["value"] == pytest.approx(-total / bytes_ / math.log(2), rel=1e-10)
    assert [metric["scores"] for metric in measured.values()] == [False, False]
    assert all(row["completions"][0]["scores"] == {} for row in rows)
    assert not any(name.endswith("_low") and value is None for name, value in flat_metrics(results).items())


def test_a_chat_is_asked_with_the_tokens_of_other_stages(
    model: Input, tokenizer: Tokenizer, engine: Float64Engine, folder: Path
) -> None:
    """Special tokens in a question stay text."""
    data = [{"question": f"say a{tokenizer.eos_token}", "choices": ["a", "b"], "gold": 0}]
    task_folder(folder, data, choice=CHOICE)
    rows, _ = evaluated(settings("choice", apply_chat_template=True), folder, engine, model.folder)
    context = encode_prompt(tokenizer, [{"role": "user", "content": data[0]["question"]}])
    for choice, request in zip("ab", rows[0]["requests"], strict=True):
        tokens = tokenizer(choice, add_special_tokens=False)["input_ids"]
        assert request["logprob"] == pytest.approx(math.fsum(engine.continuation(context, tokens)), abs=1e-10)
    assert data[0]["question"] in rows[0]["prompt"]


def test_few_shot_examples_are_of_the_seed_and_the_limit_is_of_the_start(
    model: Input, engine: Float64Engine, folder: Path
) -> None:
    task_folder(folder, choice=f"{CHOICE}fewshot_split: test\n")
    config = settings("choice", num_fewshot=1, limit=2)
    rows, results = evaluated(config, folder, engine, model.folder)
    assert [row["prompt"].count("say") for row in rows] == [2, 2]
    assert [row["prompt"].rpartition("say")[2] for row in rows] == [" a", " b"]
    assert results["num_fewshot"] == {"choice": 1}
    assert evaluated(config, folder, engine, model.folder)[0] == rows


def test_a_group_has_the_mean_of_its_tasks(model: Input, engine: Float64Engine, folder: Path) -> None:
    group = "group: both\ntask: [choice, other]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    task_folder(folder, choice=CHOICE, other=CHOICE.replace("task: choice", "task: other"), both=group)
    rows, results = evaluated(settings("both"), folder, engine, model.folder)
    assert {row["task"] for row in rows} == {"choice", "other"}
    assert results["groups"]["both"]["acc"]["value"] == results["tasks"]["choice"]["acc"]["value"]
    assert flat_metrics(results)["prompts"] == 12


def test_a_long_prompt_is_truncated_at_its_start_where_that_is_wanted(
    model: Input, tokenizer: Tokenizer, engine: Float64Engine, folder: Path
) -> None:
    task_folder(folder, choice=CHOICE)
    rollout = {"max_length": 6, "cpu_cache_gib": 0.05, "cpus_per_engine": 0.5}
    config = settings("choice", max_tokens=2, rollout=rollout, long_prompts="truncate")
    rows, results = evaluated(config, folder, engine, model.folder)
    tokens = tokenizer("say abc abc")["input_ids"]
    count = len(tokens) - len(tokenizer("say abc")["input_ids"])
    context, continuation = tokens[-6:-count], tokens[-count:]
    logprob = math.fsum(engine.continuation(context, continuation))
    assert rows[3]["requests"][0]["logprob"] == pytest.approx(logprob, abs=1e-10)
    assert flat_metrics(results)["truncated_prompts"] > 0


def test_a_gate_compares_two_benchmarks_row_by_row(
    model: Input, engine: Float64Engine, folder: Path, tmp_path: Path
) -> None:
    task_folder(folder, choice=CHOICE, say=SAY)
    config = settings("choice", "say")
    other = base_model(tmp_path / "other", seed=8)
    manifest = model.manifest.model_copy(
        update={"config": config.model_dump(mode="json"), "libraries": {"lm-eval": "1"}, "kind": Kind.EVALUATION}
    )
    compared, scores = [], []
    for name, its_engine in (("before", engine), ("after", Float64Engine(other.folder))):
        rows, results = evaluated(config, folder, its_engine, model.folder)
        write_evaluation(tmp_path / name, results, rows)
        compared.append(Input(manifest, tmp_path / name))
        scores.append([row["completions"][0]["scores"]["choice.acc"] for row in rows if row["task"] == "choice"])
    before, after = compared
    criterion = Criterion("acc", "choice.acc", "greedy", 0.0, strict=True)
    comparison = judge(before, after, criterion)
    assert comparison.value == pytest.approx(np.mean(scores[1]) - np.mean(scores[0]))
    assert comparison.prompts == 6  # those of this task

    def with_manifest(**changes: Any) -> Input:
        return Input(manifest.model_copy(update=changes), after.folder)

    with pytest.raises(ValueError, match="have different lm-eval, so their scores cannot be compared"):
        judge(before, with_manifest(libraries={"lm-eval": "2"}), criterion)
    for changes, match in (({"max_tokens": 9}, "different settings"), ({"requests_per_call": 9}, "")):
        changed = with_manifest(config=manifest.config | changes)
        if match:
            with pytest.raises(ValueError, match=match):
                judge(before, changed, criterion)
        else:
            assert judge(before, changed, criterion) == comparison
    with pytest.raises(ValueError, match=r"has no scorer `choice\.f1`; it has choice\.acc, choice\.acc_norm"):
        judge(before, after, Criterion("f1", "choice.f1", "greedy", 0.0, strict=True))


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (f"{CHOICE}unsafe_code: true\n", {}, "choice is marked `unsafe_code`"),
        (CHOICE.replace("rows.jsonl", "none.jsonl"), {}, "tasks: choice cannot be loaded: .*none.jsonl"),
        (CHOICE, {"max_tokens": 2, "rollout": {"max_length": 6}}, "fit into rollout.max_length=6 with the answer"),
        (f"{CHOICE}num_fewshot: 0\n", {"num_fewshot": 2}, "num_fewshot=2, but choice always runs zero-shot"),
        (SAY.replace("task: say", "task: choice").replace("do_sample", "num_beams: 2, do_sample"), {},
         "the engines have no `num_beams`"),
        (SAY.replace("task: say", "task: choice").replace("do_sample: false", "do_sample: true, temperature: 9"), {},
         "generation_kwargs of a task: "),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_run_is_refused(
    model: Input, engine: Float64Engine, folder: Path, text: str, changes: dict[str, Any], message: str
) -> None:
    task_folder(folder, choice=text)
    with pytest.raises(StageError, match=message):
        evaluated(settings("choice", **changes), folder, engine, model.folder)
    assert engine.calls == []


def test_a_sampled_completion_has_the_seed_of_its_request(
    model: Input, engine: Float64Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int | None] = []
    generate = engine.generate
    monkeypatch.setattr(
        engine, "generate", lambda requests: (seeds.extend(each.seed for each in requests), generate(requests))[1]
    )
    task_folder(folder, say=SAY.replace("do_sample: false", "do_sample: true, temperature: 0.5, top_k: -1"))
    evaluated(settings("say", requests_per_call=4), folder, engine, model.folder)
    assert len(set(seeds)) == 6
    first, seeds[:] = list(seeds), []
    evaluated(settings("say"), folder, engine, model.folder)
    assert seeds == first  # whatever is asked together
