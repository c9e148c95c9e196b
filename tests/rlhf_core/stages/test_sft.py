from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import encode_conversation, load_tokenizer
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.merging import MergeConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError
from rlhf_core.stages import merge, sft
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import (
    ENGINE,
    OPTIMIZER,
    base_model,
    context_of,
    conversations,
    dataset,
    inline,
)

pytestmark = pytest.mark.parts

ROWS = conversations(40)
FAST = OPTIMIZER.model_copy(update={"learning_rate": 2e-2})


def _config(**settings: object) -> SFTConfig:
    defaults = {
        "dataset": "d",
        "epochs": 5,
        "batch_size": 8,
        "max_length": 32,
        "optimizer": OPTIMIZER,
        "engine": ENGINE,
    }
    return SFTConfig(**{**defaults, **settings})  # type: ignore[arg-type]


def _inputs(folder: Path) -> dict[str, Input]:
    return {"model": base_model(folder / "base"), "dataset": dataset(folder / "data", ROWS)}


def _run(workdir: Path, inputs: dict[str, Input], config: SFTConfig, seed: int = 0) -> tuple[Output, LocalContext]:
    context = context_of(workdir, inputs, seed)
    return sft.run(config, inputs, context, inline), context


def _weights(output: Output) -> dict[str, torch.Tensor]:
    return load_file(output.folder / "model.safetensors")


def _mean_loss(model: torch.nn.Module, folder: Path) -> float:
    """Cross-entropy of the assistant tokens, by transformers alone, one conversation at a time."""
    tokenizer = load_tokenizer(folder)
    total, count = 0.0, 0
    for row in ROWS:
        [(ids, mask)] = encode_conversation(tokenizer, row["messages"])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        total -= logprobs[torch.tensor(mask[1:])].sum().item()
        count += sum(mask[1:])
    return total / count


def test_it_learns_logs_and_leaves_a_policy_that_transformers_loads(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path)
    output, context = _run(tmp_path / "run", inputs, _config(optimizer=FAST))
    assert output.kind == Kind.POLICY
    before = _mean_loss(AutoModelForCausalLM.from_pretrained(inputs["model"].folder), inputs["model"].folder)
    after = _mean_loss(AutoModelForCausalLM.from_pretrained(output.folder), output.folder)
    assert before > 4.0
    assert after < 2.2
    steps = [step for step, _ in context.logs]
    assert steps == [10, 20, 25]
    losses = [metrics["loss"] for _, metrics in context.logs]
    assert losses[0] > losses[1] > losses[2]
    last = context.logs[-1][1]
    assert last["tokens"] == 5 * sum(
        len(encode_conversation(load_tokenizer(output.folder), r["messages"])[0][0]) for r in ROWS
    )
    assert last["learning_rate"] == pytest.approx(2e-3)
    assert last["gradient_norm"] > 0
    assert last["tokens_per_second"] > 0
    assert context.progresses[-1] == (25, 25, "train", {"loss": losses[2]})
    assert output.metrics["steps"] == 25


def test_the_loss_logged_is_the_mean_over_the_steps_trained_tokens(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path)
    config = _config(epochs=1, batch_size=40, optimizer=OPTIMIZER.model_copy(update={"learning_rate": 1e-12}))
    _, context = _run(tmp_path / "run", inputs, config)
    expected = _mean_loss(AutoModelForCausalLM.from_pretrained(inputs["model"].folder), inputs["model"].folder)
    assert context.logs[0][1]["loss"] == pytest.approx(expected, abs=1e-5)


def test_the_same_seed_gives_identical_weights_and_micro_batches_do_not_matter(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path)
    config = _config(epochs=1)
    first = _weights(_run(tmp_path / "a", inputs, config)[0])
    again = _weights(_run(tmp_path / "b", inputs, config)[0])
    other = _weights(_run(tmp_path / "c", inputs, config, seed=1)[0])
    whole = config.model_copy(update={"engine": ENGINE.model_copy(update={"tokens_per_micro_batch": 10_000})})
    one_micro_batch = _weights(_run(tmp_path / "d", inputs, whole)[0])
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert all((first[name] - one_micro_batch[name]).abs().max() < 1e-5 for name in first)


def test_lora_leaves_an_adapter_and_its_merge_is_the_same_policy(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path)
    output, _ = _run(tmp_path / "run", inputs, _config(optimizer=FAST, lora=LoraConfig(rank=8)))
    assert output.kind == Kind.ADAPTER
    assert not (output.folder / "model.safetensors").exists()
    merged = merge.run(
        MergeConfig(adapter="sft"),
        {"model": inputs["model"], "adapter": local_input(output.folder, Kind.ADAPTER)},
        LocalContext(tmp_path / "merge"),
    )
    assert merged.kind == Kind.POLICY
    policy = AutoModelForCausalLM.from_pretrained(merged.folder)
    base = AutoModelForCausalLM.from_pretrained(inputs["model"].folder)
    assert _mean_loss(policy, merged.folder) < _mean_loss(base, merged.folder) - 0.3
    adapted = PeftModel.from_pretrained(base, str(output.folder))
    assert _mean_loss(adapted, merged.folder) == pytest.approx(_mean_loss(policy, merged.folder), abs=1e-5)


def test_a_conversation_that_is_too_long_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path)
    with pytest.raises(StageError, match=r"row row\d+ is \d+ tokens long and max_length is 6"):
        _run(tmp_path / "run", inputs, _config(max_length=6))


def test_a_model_without_a_chat_template_names_the_settings_that_give_it_one(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path)
    (inputs["model"].folder / "chat_template.jinja").unlink()
    with pytest.raises(StageError, match=r"no chat template.*set the base stage's chat_template to .* input_template"):
        _run(tmp_path / "run", inputs, _config())
