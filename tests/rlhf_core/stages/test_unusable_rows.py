"""Rows that a stage cannot use as they are: too long, or nothing that its chat template can write.

No check before the run may have seen them: their stage names them before any worker or engine starts, or drops or
truncates and counts them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.evaluation import EvaluationConfig
from rlhf_core.config.stages.language_models import PretrainConfig, SFTConfig
from rlhf_core.config.stages.reward_models import RewardModelConfig
from rlhf_core.config.stages.trained import SupervisedConfig
from rlhf_core.contract import Input
from rlhf_core.data.fitting import RowPolicy
from rlhf_core.data.prompts import fit_prompts
from rlhf_core.errors import StageError
from rlhf_core.stages import evaluation, pretrain, reward_model, rl, sft
from tests.rlhf_core.stages.supervised_runs import (
    ENGINE,
    OPTIMIZER,
    base_model,
    context_of,
    dataset,
    inline,
    no_cluster,
    pairs,
)

pytestmark = pytest.mark.parts

LONG = "x" * 30  # with <bos>, <user> and <assistant> 33 tokens
TURN = {"role": "user", "content": LONG}
TALK = {"messages": [TURN, {"role": "assistant", "content": "a"}]}
PAIR = {"prompt": [TURN], "chosen": "a", "rejected": "b", "margin": None}
OTHER_PAIR = {**PAIR, "prompt": [{"role": "user", "content": "y"}]}
PROMPTS = {"dataset": "d", "sampling": {"max_tokens": 8}, "rollout": {"max_length": 40}}
MISSING = {"type": "function", "path": "no.py"}  # not even read


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return base_model(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    ("run", "config", "rows"),
    [(sft.run, SFTConfig, [TALK]), (reward_model.run, RewardModelConfig, [PAIR, OTHER_PAIR])],
)
def test_a_row_that_is_too_long_to_train_on(
    model: Input, tmp_path: Path, run: Any, config: type[SupervisedConfig], rows: list[dict[str, Any]]
) -> None:
    inputs = {"model": model, "dataset": dataset(tmp_path / "data", rows)}
    settings = config(dataset="d", batch_size=2, max_length=34, optimizer=OPTIMIZER, engine=ENGINE)
    context = context_of(tmp_path / "run", inputs)
    with pytest.raises(
        StageError, match=r"^row row0 is 35 tokens long and max_length is 34: raise max_length, or drop"
    ):
        run(settings, inputs, context, no_cluster)
    assert context.progresses == []


def test_a_length_beyond_the_model_s_context(model: Input, tmp_path: Path) -> None:
    inputs = {"model": model, "dataset": dataset(tmp_path / "data", [{"text": "a"}])}
    settings = PretrainConfig(dataset="d", batch_size=2, max_length=65, optimizer=OPTIMIZER, engine=ENGINE)
    with pytest.raises(StageError, match=r"^max_length is 65, but the model's context is 64 tokens$"):
        pretrain.run(settings, inputs, context_of(tmp_path / "run", inputs), no_cluster)


@pytest.mark.parametrize(
    ("run", "config"),
    [
        (rl.run, RLConfig.model_validate({**PROMPTS, "algorithm": "grpo", "steps": 1, "prompts_per_step": 1,
                                          "grpo": {"rewards": {"own": MISSING}, "optimizer": {"learning_rate": 0.1}}})),
        (evaluation.run, EvaluationConfig.model_validate({**PROMPTS, "scorers": {"own": MISSING}})),
    ],
)  # fmt: skip
def test_a_prompt_that_leaves_no_room_for_its_completion(model: Input, tmp_path: Path, run: Any, config: Any) -> None:
    inputs = {"model": model, "dataset": dataset(tmp_path / "data", [{"prompt": [TURN], "answer": "a"}])}
    context = context_of(tmp_path / "run", inputs)
    with pytest.raises(
        StageError,
        match=r"^prompt row0 \('x{30}'\) has 33 tokens, more than the 32 that `rollout.max_length` leaves beside "
        r"`sampling.max_tokens`: raise it, or set the dataset's on_long_row to drop$",
    ):
        run(config, inputs, context, no_cluster)
    assert context.progresses == []


def talk(prompt: str, completion: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]}


LONG_PAIR = {**OTHER_PAIR, "chosen": "a" * 30, "rejected": "b"}
LOST_PAIR = {**OTHER_PAIR, "chosen": "a" * 30, "rejected": "a" * 30 + "b"}  # cut, both completions are the same


@pytest.mark.parametrize(
    ("run", "config", "rows", "policy", "tokens", "counts"),
    [
        # Each short conversation is <bos> <user> a <assistant> b <eos>. In the other two the answer, or only the prompt
        # and none of the answer, fits into 12 tokens.
        (sft.run, SFTConfig, [talk("a", "b")] * 3 + [talk("a", "b" * 30), talk(LONG, "b")], "drop", 18,
         {"rows_dropped_too_long": 2}),
        (sft.run, SFTConfig, [talk("a", "b")] * 3 + [talk("a", "b" * 30), talk(LONG, "b")], "truncate", 30,
         {"rows_truncated": 1, "rows_dropped_too_long": 1}),
        # A document is <bos> and its text and <eos>: of 13 tokens it is split into pieces of 12 and 2.
        (pretrain.run, PretrainConfig, [{"text": "a"}] * 3 + [{"text": "b" * 11}], "error", 23, {}),
        (pretrain.run, PretrainConfig, [{"text": "a"}] * 3 + [{"text": "b" * 11}], "drop", 9,
         {"rows_dropped_too_long": 1}),
        (pretrain.run, PretrainConfig, [{"text": "a"}] * 3 + [{"text": "b" * 11}], "truncate", 21,
         {"rows_truncated": 1, "rows_dropped_too_long": 0}),
        (reward_model.run, RewardModelConfig, [*pairs(1), LONG_PAIR, LOST_PAIR, PAIR], "truncate", None,
         {"rows_truncated": 1, "rows_dropped_too_long": 2}),
    ],
)  # fmt: skip
def test_long_rows_are_dropped_or_truncated_and_counted_in_the_manifest(
    model: Input, tmp_path: Path, run: Any, config: type[SupervisedConfig], rows: list[dict[str, Any]], policy: str,
    tokens: int | None, counts: dict[str, int],
) -> None:  # fmt: skip
    """tokens: trained on in one epoch, which is one step."""
    inputs = {"model": model, "dataset": dataset(tmp_path / "data", rows, policy)}
    length = 16 if config is RewardModelConfig else 12
    settings = config(dataset="d", batch_size=8, epochs=1, max_length=length, optimizer=OPTIMIZER, engine=ENGINE)
    output = run(settings, inputs, context_of(tmp_path / "run", inputs), inline)
    assert {name: value for name, value in output.metrics.items() if name.startswith("rows_")} == {
        "rows_read": len(rows), **counts
    }  # fmt: skip
    assert output.metrics["steps"] == 1
    if tokens is not None:
        assert output.metrics["tokens"] == tokens


def test_rows_that_are_all_too_long_are_an_error_under_any_policy(model: Input, tmp_path: Path) -> None:
    inputs = {"model": model, "dataset": dataset(tmp_path / "data", [TALK, TALK], "drop")}
    settings = SFTConfig(dataset="d", batch_size=2, max_length=34, optimizer=OPTIMIZER, engine=ENGINE)
    with pytest.raises(StageError, match=r"^all 2 rows of the dataset are longer than max_length=34$"):
        sft.run(settings, inputs, context_of(tmp_path / "run", inputs), no_cluster)


SYSTEM = {"role": "system", "content": "be brief"}  # which the template of these models refuses
ASKED = [SYSTEM, {"role": "user", "content": "a"}]
NO_TURN = {"messages": [{"role": "assistant", "content": "b"}]}
UNWRITABLE = [
    (sft.run, SFTConfig, talk("a", "b"), {"messages": [*ASKED, {"role": "assistant", "content": "b"}]}),
    (sft.run, SFTConfig, talk("a", "b"), NO_TURN),
    (reward_model.run, RewardModelConfig, PAIR, {**PAIR, "prompt": ASKED}),
]


@pytest.mark.parametrize(("run", "config", "good", "bad"), UNWRITABLE)
def test_rows_that_the_template_cannot_write_are_named_or_dropped_and_counted(
    model: Input, tmp_path: Path, run: Any, config: type[SupervisedConfig], good: dict[str, Any], bad: dict[str, Any]
) -> None:
    settings = config(dataset="d", batch_size=8, epochs=1, max_length=40, optimizer=OPTIMIZER, engine=ENGINE)
    rows = [good, bad, OTHER_PAIR if config is RewardModelConfig else good]

    def outcome(name: str, rows: list[dict[str, Any]], policy: str, cluster: Any) -> Any:
        inputs = {"model": model, "dataset": dataset(tmp_path / name, rows, on_bad_row=policy)}
        return run(settings, inputs, context_of(tmp_path / f"{name}-run", inputs), cluster)

    said = r"row row1: the c.*; or drop such rows \(the dataset's on_bad_row\)$"
    with pytest.raises(StageError, match=f"^{said}"):
        outcome("error", rows, "error", no_cluster)
    assert outcome("drop", rows, "drop", inline).metrics["rows_dropped_bad"] == 1
    with pytest.raises(
        StageError, match=r"^the chat template can write none of the 2 rows; the first, row row0: the c"
    ):
        outcome("all", [bad, bad], "drop", no_cluster)


def test_prompts_that_the_template_cannot_write_are_named_or_dropped_and_counted(model: Input) -> None:
    rows = [{"id": "a", "prompt": ASKED}, {"id": "b", "prompt": ASKED[1:]}]
    tokenizer = load_tokenizer(model.folder)
    with pytest.raises(StageError, match=r"^row a: the chat template refuses a conversation: "):
        fit_prompts(rows, tokenizer, max_tokens=8, policy=RowPolicy())
    fitted = fit_prompts(rows, tokenizer, max_tokens=8, policy=RowPolicy(bad="drop"))
    assert [prompt.id for prompt in fitted.rows] == ["b"]
    assert fitted.metrics() == {"rows_read": 2, "rows_dropped_bad": 1}


def test_a_template_that_is_broken_is_an_error_under_any_policy(model: Input) -> None:
    tokenizer = load_tokenizer(model.folder)
    tokenizer.chat_template = "{% if %}"
    with pytest.raises(StageError, match=r"^syntax error in line 1 of the chat template"):
        fit_prompts([{"id": "a", "prompt": ASKED}], tokenizer, max_tokens=8, policy=RowPolicy(bad="drop"))
