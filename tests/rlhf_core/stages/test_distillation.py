"""The stage of distillation: what a student learns, from a teacher or its stored log-probs; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.distillation import DistillationConfig
from rlhf_core.config.stages.logprobs import TopLogprobsConfig
from rlhf_core.contract import Input
from rlhf_core.errors import StageError
from rlhf_core.stages import distillation, logprobs, top_logprobs
from rlhf_core.supervised import stored_top_logprobs
from rlhf_core.supervised.sft import conversation_examples
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.stages.supervised_runs import (
    ENGINE,
    base_model,
    context_of,
    conversations,
    dataset,
    inline,
    no_cluster,
)

pytestmark = pytest.mark.endurance("architectures")

SETTINGS: dict[str, Any] = {
    "dataset": "d", "batch_size": 8, "epochs": 2, "max_length": 48, "log_every": 1, "engine": ENGINE.model_dump(),
    "optimizer": {"learning_rate": 5e-3, "warmup_share": 0.0, "schedule": "constant"},
    "validation": {"dataset": "v", "every_steps": 4}, "teacher": {"model": "t"},
}  # fmt: skip
ROWS = conversations(30)
Inputs = dict[str, Input]


def config_of(**settings: Any) -> DistillationConfig:
    return DistillationConfig.model_validate_json(json.dumps({**SETTINGS, **settings}))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    return {
        "model": base_model(folder / "student"), "teacher.model": base_model(folder / "teacher", seed=1, hidden=48),
        "dataset": dataset(folder / "d", ROWS[:24]), "validation.dataset": dataset(folder / "v", ROWS[24:]),
    }  # fmt: skip


def stored(folder: Path, inputs: Inputs, rows: str, **settings: Any) -> Input:
    config = TopLogprobsConfig.model_validate({"dataset": "d", "max_length": 48, "engine": ENGINE, **settings})
    given = {"model": inputs["teacher.model"], "dataset": inputs[rows]}
    output = top_logprobs.run(config, given, context_of(folder, given, seed=None), inline)
    assert output.kind == Kind.TOP_LOGPROBS
    return local_input(output.folder, Kind.TOP_LOGPROBS)


def test_the_student_comes_nearer_to_its_teacher(inputs: Inputs, tmp_path: Path) -> None:
    context = context_of(tmp_path, inputs)
    output = distillation.run(config_of(epochs=6), inputs, context, inline)
    assert output.kind == Kind.POLICY
    measured = [line["validation/divergence"] for _, line in context.logs if "validation/divergence" in line]
    assert measured[-1] < 0.7 * measured[0]


def test_what_is_stored(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_EXAMPLES", 5)
    monkeypatch.setattr(stored_top_logprobs, "_VALUES", 60)
    folder = stored(tmp_path, inputs, "dataset", k=3, temperature=1.5).folder
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(inputs["teacher.model"].folder)
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert {line["id"] for line in lines} == {f"row{index}" for index in range(24)}
    read = stored_top_logprobs.StoredTop([folder])
    tokenizer = load_tokenizer(inputs["model"].folder)
    for index in (0, 1, 23):
        (example,) = conversation_examples(tokenizer, {"id": f"row{index}", **ROWS[index]})
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(example.sequences)).logits[0, :-1]
        wanted = (logits / 1.5).softmax(-1)[torch.tensor(example.masks[0][1:])]
        tokens, found = read.of(example)
        mass, best = wanted.topk(3)
        assert tokens.tolist() == best.tolist()
        torch.testing.assert_close(found.exp()[:, :-1], mass)
        torch.testing.assert_close(found.exp()[:, -1], 1 - mass.sum(-1))


def logs_of(config: DistillationConfig, inputs: Inputs, folder: Path) -> list[tuple[int, dict[str, float]]]:
    context = context_of(folder, inputs)
    distillation.run(config, inputs, context, inline)
    return context.logs


def test_learning_from_all_stored_log_probs_is_learning_from_the_teacher(inputs: Inputs, tmp_path: Path) -> None:
    read = {
        f"teacher.top_logprobs.{name}": stored(tmp_path / name, inputs, rows, k=100_000, temperature=1.5)
        for name, rows in (("trained", "dataset"), ("tested", "validation.dataset"))
    }
    from_teacher = logs_of(config_of(temperature=1.5), inputs, tmp_path / "0")
    given = {**{name: item for name, item in inputs.items() if name != "teacher.model"}, **read}
    from_stored = logs_of(config_of(teacher={"top_logprobs": ["trained", "tested"]}), given, tmp_path / "1")
    for (step, ours), (other, theirs) in zip(from_teacher, from_stored, strict=True):
        assert step == other
        for metric in ours.keys() & {"loss", "validation/loss", "cross_entropy", "gradient_norm"}:
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4)


@pytest.mark.parametrize("lacking", ["rows", "one way"])
def test_stored_log_probs_that_do_not_fit_are_an_error(inputs: Inputs, tmp_path: Path, lacking: str) -> None:
    given = {**inputs, "teacher.top_logprobs.a": stored(tmp_path / "a", inputs, "dataset", k=2)}
    if lacking == "rows":
        message = r"^validation\.dataset: teacher\.top_logprobs: no stage has read the tokens of row row0: give the"
    else:
        given["teacher.top_logprobs.b"] = stored(tmp_path / "b", inputs, "validation.dataset", k=3)
        message = r"^teacher\.top_logprobs: .*k=2.*k=3.*: take those of one k, temperature and vocabulary"
    names = [name.rpartition(".")[2] for name in given if name.startswith("teacher.top")]
    with pytest.raises(StageError, match=message):
        distillation.run(config_of(teacher={"top_logprobs": names}), given, context_of(tmp_path, given), no_cluster)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"vocab_size": 300},
            r"^teacher\.model: its distributions are over 300 tokens, and the student's over",
        ),
        ({"max_position_embeddings": 32}, r"^teacher\.model: its context is 32 tokens, and sequences have up to max"),
        (None, r"^teacher\.model: its tokenizer differs from the student's: name another model$"),
    ],
    ids=["vocabulary", "context", "tokenizer"],
)
def test_a_teacher_that_cannot_teach_is_an_error(
    inputs: Inputs, tmp_path: Path, change: dict[str, int] | None, message: str
) -> None:
    folder = base_model(tmp_path / "other").folder
    path = folder / ("tokenizer.json" if change is None else "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **(change or {"version": "2.0"})}))
    given = {**inputs, "teacher.model": local_input(folder, Kind.BASE_MODEL)}
    with pytest.raises(StageError, match=message):
        distillation.run(config_of(), given, context_of(tmp_path / "run", given), no_cluster)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": {}}, "name the teacher: either `model`, to run it, or `top_logprobs`"),
        ({"teacher": {"model": "t", "top_logprobs": ["a"]}}, "name the teacher: either `model`"),
        ({"teacher": {"top_logprobs": ["a"], "engine": {}}}, "`engine` is for a teacher that is run here"),
        ({"teacher": {"top_logprobs": ["a"]}, "temperature": 2.0}, "set it there"),
        ({"teacher": {"top_logprobs": ["a"]}, "divergence": "reverse_kl"}, "use forward_kl, or run the teacher"),
        ({"teacher_weight": 0.3}, "teacher_weight is a setting of jensen_shannon, but the divergence is forward_kl"),
        ({"divergence": "jensen_shannon", "teacher_weight": 1.0}, "the loss would be 0; its limit is reverse_kl"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config_of(**settings)
    assert message in str(caught.value)
