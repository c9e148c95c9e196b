"""Validation of SFT, pre-training and reward models: what is measured, which weights are kept, what is not changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from peft import PeftModel
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.chat.encoding import encode_completion, encode_conversation, encode_text, load_tokenizer
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.language_models import PretrainConfig, SFTConfig
from rlhf_core.config.stages.reward_models import RewardModelConfig
from rlhf_core.contract import Input, Output
from rlhf_core.data.reading import read_rows
from rlhf_core.errors import StageError
from rlhf_core.stages import pretrain, reward_model, sft
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.sft import LanguageModelWorker
from rlhf_core.testing.stage import without_times
from rlhf_core.training.metrics import StepMetrics
from tests.rlhf_core.stages.context import LocalContext, wait_for_checkpoint
from tests.rlhf_core.stages.supervised_runs import (
    base_model,
    context_of,
    conversations,
    dataset,
    inline,
    no_cluster,
    pairs,
    stored_config,
)

pytestmark = pytest.mark.parts

SHARED: dict[str, Any] = {
    "dataset": "d", "batch_size": 8, "max_length": 32, "log_every": 3,
    "optimizer": {"learning_rate": 2e-2, "schedule": "constant", "warmup_share": 0.0},
    "engine": {"dtype": "float32", "zero_stage": 0, "tokens_per_micro_batch": 64},
}  # fmt: skip
# Random numbers in every forward that trains.
SFT: dict[str, Any] = {**SHARED, "epochs": 2, "lora": {"rank": 4, "dropout": 0.2}}  # 20 rows: 6 steps
VALIDATION: dict[str, Any] = {"dataset": "v", "every_steps": 2, "also": {"far": {"dataset": "f"}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return base_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def talks(model: Input, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("talks")
    rows = conversations(40)
    return {
        "model": model, "dataset": dataset(folder / "d", rows[:20]),
        "validation.dataset": dataset(folder / "v", rows[20:37]),
        "validation.also.far.dataset": dataset(folder / "f", rows[37:]),
    }  # fmt: skip


class ClusterOf(InProcessCluster):
    """Whatever worker a stage asks for, it gets one of `worker`."""

    def __init__(self, worker: type[LanguageModelWorker]) -> None:
        super().__init__()
        self._worker = worker

    def workers(self, placement: Placement, engine: EngineConfig, factory: Callable[..., Any], /, *args: Any) -> Any:
        return super().workers(placement, engine, self._worker, *args)


def run_sft(
    workdir: Path, inputs: dict[str, Input], worker: type[LanguageModelWorker] | None = None, **settings: Any
) -> tuple[Output, LocalContext]:
    config = SFTConfig.model_validate({**SFT, **settings})
    context = context_of(workdir, inputs)
    return sft.run(config, inputs, context, inline if worker is None else ClusterOf(worker)), context


def weights(output: Output) -> bytes:
    return (output.folder / "adapter_model.safetensors").read_bytes()


def lines(context: LocalContext, *, validation: bool) -> list[tuple[int, dict[str, float]]]:
    """Without times, those of validations or those of training."""
    return [
        (step, without_times(line)) for step, line in context.logs if any("/" in name for name in line) is validation
    ]


def mean_loss(loaded: torch.nn.Module, sequences: list[tuple[list[int], list[bool]]]) -> float:
    """Of the trained tokens, each sequence alone."""
    total, count = 0.0, 0
    for ids, mask in sequences:
        with torch.no_grad():
            logprobs = loaded(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        total -= logprobs.gather(1, torch.tensor(ids[1:])[:, None])[torch.tensor(mask[1:]), 0].sum().item()
        count += sum(mask[1:])
    return total / count


def test_sft_is_validated_and_its_training_is_as_it_is_without(talks: dict[str, Input], tmp_path: Path) -> None:
    plain, plain_context = run_sft(tmp_path / "plain", talks)
    output, context = run_sft(tmp_path / "run", talks, validation={**VALIDATION, "keep": "last"})
    assert weights(output) == weights(plain)
    assert lines(context, validation=False) == lines(plain_context, validation=False)
    validated = lines(context, validation=True)
    assert [step for step, _ in validated] == [2, 4, 6]
    # By transformers and peft alone, in float64, each conversation by itself.
    base = AutoModelForCausalLM.from_pretrained(talks["model"].folder)
    adapted = PeftModel.from_pretrained(base, str(output.folder)).double()
    tokenizer = load_tokenizer(talks["model"].folder)
    for name, prefix in (("validation.dataset", ""), ("validation.also.far.dataset", "far/")):
        rows = read_rows(talks[name].folder)
        sequences = [one for row in rows for one in encode_conversation(tokenizer, row["messages"])]
        assert validated[-1][1][f"validation/{prefix}loss"] == pytest.approx(mean_loss(adapted, sequences), abs=1e-5)
    best_step, best = min(((s, line["validation/loss"]) for s, line in validated), key=lambda found: found[1])
    assert (output.metrics["validation_best"], output.metrics["validation_best_step"]) == (best, best_step)
    assert {name: v for name, v in output.metrics.items() if "validation" not in name and "second" not in name} == {
        name: value for name, value in plain.metrics.items() if "second" not in name
    }
    assert [step for step, _, phase, _ in context.progresses if phase == "validate"] == [2, 4, 6]
    assert context.progresses[-1][2] == "train"


class Scripted(LanguageModelWorker):
    """Says what its validation of the main set measures, by the steps that are done."""

    SCRIPT: ClassVar = {1: math.nan, 2: 3.0, 3: 1.0, 4: 1.0, 5: -math.inf, 6: 2.0}

    def validate(self, shard: Shard) -> dict[str, float]:
        return super().validate(shard) | {"loss": self.SCRIPT[self.engine.counters.steps]}


@pytest.mark.endurance("chaos")
def test_the_weights_of_the_best_step_are_the_result(talks: dict[str, Input], tmp_path: Path) -> None:
    validation = {"dataset": "v", "every_steps": 1}
    output, context = run_sft(tmp_path / "run", talks, Scripted, validation=validation)
    assert (output.metrics["validation_best"], output.metrics["validation_best_step"]) == (1.0, 3)
    third, _ = run_sft(tmp_path / "third", talks, max_steps=3)
    last, _ = run_sft(tmp_path / "last", talks, Scripted, validation={**validation, "keep": "last"})
    assert weights(output) == weights(third) != weights(last)
    found = [line.get("validation/best_step") for _, line in lines(context, validation=True)]
    assert found == [None, 2, 3, 3, 3, 3]


class Broken(Scripted):
    SCRIPT: ClassVar = dict.fromkeys(range(1, 7), math.nan)


@pytest.mark.endurance("chaos")
@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_run_without_a_finite_validation_fails(talks: dict[str, Input], tmp_path: Path, keep: str) -> None:
    with pytest.raises(StageError, match="`loss` was finite at no step"):
        run_sft(tmp_path, talks, Broken, validation={**VALIDATION, "keep": keep})


class Worsening(Scripted):
    SCRIPT: ClassVar = {2: 1.0, 4: 2.0, 6: 3.0}


class Dying(Worsening):
    """Dies in step 6."""

    def train(self, steps: Any) -> list[StepMetrics]:
        wait_for_checkpoint()
        if self.engine.counters.steps == 5:
            raise ConnectionError("died")
        return super().train(steps)


@pytest.mark.endurance("chaos")
def test_a_run_that_is_killed_between_validations_ends_as_if_it_had_not_been(
    talks: dict[str, Input], tmp_path: Path
) -> None:
    """Validated after 2, 4 and 6 steps; checkpoints after 3; here the second step is best."""
    settings = {"checkpoint": {"every_steps": 3}, "validation": VALIDATION, "log_every": 1}
    whole, undisturbed = run_sft(tmp_path / "whole", talks, Worsening, **settings)
    with pytest.raises(ConnectionError):
        run_sft(tmp_path / "killed", talks, Dying, **settings)
    resumed, context = run_sft(tmp_path / "killed", talks, Worsening, **settings)
    assert (3, 6, "resumes after step 3", {}) in context.progresses
    assert whole.metrics["validation_best_step"] == 2
    assert weights(resumed) == weights(whole)
    assert without_times(resumed.metrics) == without_times(whole.metrics)
    for validation in (True, False):
        assert lines(context, validation=validation) == lines(undisturbed, validation=validation)


def test_held_out_rows_follow_the_policy_of_their_dataset(model: Input, tmp_path: Path) -> None:
    """A document of 24 tokens is cut into pieces of 16 and 9, is dropped, or keeps its beginning."""
    text = [{"text": "the cat sat on the mat"}, {"text": "a dog"}]
    inputs = {
        "model": model, "dataset": dataset(tmp_path / "d", text),
        "validation.dataset": dataset(tmp_path / "v", text),
        "validation.also.short.dataset": dataset(tmp_path / "s", text, "drop"),
        "validation.also.cut.dataset": dataset(tmp_path / "c", text, "truncate"),
    }  # fmt: skip
    also = {"short": {"dataset": "s"}, "cut": {"dataset": "c"}}
    validation = {"dataset": "v", "every_steps": 1, "metric": "short/loss", "also": also}
    config = PretrainConfig.model_validate({**SHARED, "max_length": 16, "max_steps": 1, "validation": validation})
    context = context_of(tmp_path / "run", inputs)
    output = pretrain.run(config, inputs, context, inline)
    loaded = AutoModelForCausalLM.from_pretrained(output.folder).double()
    long, short = (encode_text(load_tokenizer(output.folder), row["text"]) for row in text)
    measured = context.logs[-1][1]
    for name, pieces in {"": [long[:16], long[15:], short], "short/": [short], "cut/": [long[:16], short]}.items():
        expected = mean_loss(loaded, [(piece, [True] * len(piece)) for piece in pieces])
        assert measured[f"validation/{name}loss"] == pytest.approx(expected, abs=1e-5)
    assert output.metrics["validation_best"] == measured["validation/short/loss"]
    assert {name: value for name, value in output.metrics.items() if "rows" in name and "rows_read" not in name} == {
        "validation_short_rows_dropped_too_long": 1,
        "validation_cut_rows_dropped_too_long": 0, "validation_cut_rows_truncated": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], r"^validation\.also\.far\.dataset: the dataset has no row$"),
        ([{"messages": [{"role": "user", "content": "x" * 30}, {"role": "assistant", "content": "a"}]}],
         r"^validation\.also\.far\.dataset: row row0 is 35 tokens long and max_length is 32"),
    ],
)  # fmt: skip
def test_held_out_rows_that_cannot_be_measured_are_named_first(
    talks: dict[str, Input], tmp_path: Path, rows: list[dict[str, Any]], says: str
) -> None:
    inputs = {**talks, "validation.also.far.dataset": dataset(tmp_path / "d", rows)}

    config = SFTConfig.model_validate({**SFT, "validation": VALIDATION})
    with pytest.raises(StageError, match=says):
        sft.run(config, inputs, context_of(tmp_path / "run", inputs), no_cluster)


@pytest.mark.endurance("chaos")
def test_a_reward_model_trains_all_pairs_and_is_judged_by_the_held_out_ones(model: Input, tmp_path: Path) -> None:
    rows = pairs(24)
    for row in rows[20:22]:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    inputs = {
        "model": model, "dataset": dataset(tmp_path / "d", rows[:16]),
        "validation.dataset": dataset(tmp_path / "v", rows[16:]),
    }  # fmt: skip
    validation = {"dataset": "v", "every_steps": 1, "metric": "accuracy"}
    config = RewardModelConfig.model_validate({**SHARED, "epochs": 3, "validation": validation})
    context = context_of(tmp_path / "run", inputs)
    output = reward_model.run(config, inputs, context, inline)
    tokenizer = load_tokenizer(output.folder)
    loaded = AutoModelForSequenceClassification.from_pretrained(output.folder).double()
    scores = []
    for row in rows[16:]:
        for side in ("chosen", "rejected"):
            ids, _ = encode_completion(tokenizer, row["prompt"], row[side])
            with torch.no_grad():
                scores.append(loaded(input_ids=torch.tensor([ids])).logits.item())
    found = torch.tensor(scores, dtype=torch.float64).reshape(-1, 2)
    gap = found[:, 0] - found[:, 1]
    accuracy = (gap > 0).double().mean().item()
    # The weights are those of the best step, and so are all figures of the manifest.
    logged = {step: line for step, line in lines(context, validation=True) if "validation/loss" in line}
    assert list(logged) == [1, 2, 3, 4, 5, 6]
    step = int(output.metrics["validation_best_step"])  # type: ignore[arg-type]
    assert accuracy == 0.75 == max(line["validation/accuracy"] for line in logged.values())
    assert output.metrics["validation_best"] == output.metrics["held_out_accuracy"] == accuracy
    assert step == min(s for s, line in logged.items() if line["validation/accuracy"] == accuracy)
    margins = torch.tensor([row["margin"] or 0.0 for row in rows[16:]])
    expected = -logsigmoid(gap - margins).mean().item()
    assert logged[step]["validation/loss"] == pytest.approx(expected, abs=1e-5)
    assert logged[step]["validation/reward_gap"] == pytest.approx(gap.mean().item(), abs=1e-5)
    assert output.metrics["held_out_pairs"] == 8
    for name, value in {"reward_mean": found.mean(), "reward_std": found.std(correction=0)}.items():
        assert output.metrics[name] == stored_config(output.folder)[name] == logged[step][f"validation/{name}"]
        assert output.metrics[name] == pytest.approx(value.item(), abs=1e-5)
    assert output.metrics["tokens"] == 3 * sum(
        len(encode_completion(tokenizer, row["prompt"], row[side])[0])
        for row in rows[:16] for side in ("chosen", "rejected")
    )  # fmt: skip
