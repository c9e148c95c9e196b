from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import encode_completion, load_tokenizer
from rlhf_core.config.stages.reward_models import RewardModelConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError
from rlhf_core.models.folders.folder import ADAPTER
from rlhf_core.models.loading import load_scalar_adapter, load_scalar_model
from rlhf_core.models.packed import ScalarModel
from rlhf_core.stages import reward_model
from rlhf_core.supervised.held_out import split_by_prompt
from rlhf_core.supervised.pairs import pack_pairs
from rlhf_core.supervised.reward_model import judged_pair
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.stages.supervised_runs import (
    ENGINE,
    OPTIMIZER,
    base_model,
    context_of,
    dataset,
    inline,
    pairs,
    stored_config,
)

pytestmark = pytest.mark.parts

ROWS = [{"id": f"row{index}", **row} for index, row in enumerate(pairs(60))]


def _config(**settings: object) -> RewardModelConfig:
    defaults = {
        "dataset": "d",
        "epochs": 3,
        "batch_size": 8,
        "max_length": 32,
        "optimizer": OPTIMIZER,
        "engine": ENGINE,
    }
    return RewardModelConfig(**{**defaults, **settings})  # type: ignore[arg-type]


def _inputs(folder: Path, *, tied: bool = True) -> dict[str, Input]:
    return {"model": base_model(folder / "base", tied=tied), "dataset": dataset(folder / "data", ROWS)}


def _run(workdir: Path, inputs: dict[str, Input], config: RewardModelConfig) -> tuple[Output, LocalContext]:
    context = context_of(workdir, inputs)
    return reward_model.run(config, inputs, context, inline), context


def _scores_by_transformers(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Tensor:
    """(pairs, 2), as a stranger would: text in a padded batch."""
    tokenizer = load_tokenizer(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    texts = [
        tokenizer.decode(encode_completion(tokenizer, row["prompt"], row[side])[0])
        for row in rows
        for side in ("chosen", "rejected")
    ]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return scores.reshape(-1, 2)


def test_it_learns_the_preference_and_transformers_gives_the_same_scores(tmp_path: Path) -> None:
    output, context = _run(tmp_path / "run", _inputs(tmp_path), _config())
    assert output.kind == Kind.REWARD_MODEL
    assert output.metrics["held_out_pairs"] == 3
    assert output.metrics["held_out_accuracy"] == 1.0
    losses = [metrics["loss"] for _, metrics in context.logs if "loss" in metrics]
    assert losses[0] > losses[-1]
    assert context.logs[1][1]["accuracy"] > 0.9

    _, held_out = split_by_prompt(ROWS, context.seed)
    scores = _scores_by_transformers(output.folder, held_out)
    tokenizer = load_tokenizer(output.folder)
    batch = pack_pairs([judged_pair(tokenizer, row) for row in held_out])
    ours = ScalarModel(load_scalar_model(output.folder, dtype=torch.float32, attention="sdpa"))
    with torch.no_grad():
        assert torch.allclose(ours(batch)[batch.last_token_indices].reshape(-1, 2), scores, atol=1e-5)
    stored = stored_config(output.folder)
    assert stored["reward_mean"] == pytest.approx(scores.mean().item(), abs=1e-5)
    assert stored["reward_std"] == pytest.approx(scores.std(correction=0).item(), abs=1e-5)
    assert stored["architectures"] == ["LlamaForSequenceClassification"]
    assert context.logs[-1][1]["held_out_accuracy"] == 1.0


@pytest.mark.endurance("architectures")
def test_the_language_model_term_is_trained_beside_it(tmp_path: Path) -> None:
    """Two ranks train it sharded in test_two_ranks.py."""
    config = _config(language_model_coefficient=1.0)
    output, context = _run(tmp_path / "run", _inputs(tmp_path), config)
    language = [metrics["language_model_loss"] for _, metrics in context.logs if "loss" in metrics]
    assert language[-1] < language[0] - 1.0
    assert output.metrics["held_out_accuracy"] == 1.0
    scores = _scores_by_transformers(output.folder, ROWS)
    assert (scores[:, 0] > scores[:, 1]).all()


@pytest.mark.endurance("architectures")
def test_centring_keeps_the_mean_of_rewards_near_0(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path)
    sums = []
    for coefficient in (0.0, 1.0):
        output, _ = _run(tmp_path / str(coefficient), inputs, _config(centring_coefficient=coefficient))
        sums.append(_scores_by_transformers(output.folder, ROWS).sum(1).square().mean().item())
        assert output.metrics["held_out_accuracy"] == 1.0
    assert sums[1] < 0.5 * sums[0]


@pytest.mark.endurance("architectures")
def test_lora_is_merged_with_its_head(tmp_path: Path) -> None:
    fast = OPTIMIZER.model_copy(update={"learning_rate": 2e-2})
    inputs = _inputs(tmp_path)
    output, _ = _run(tmp_path / "run", inputs, _config(lora=LoraConfig(rank=4), optimizer=fast))
    assert not (output.folder / "adapter_config.json").exists()
    folder, adapter = inputs["model"].folder, output.folder / ADAPTER
    apart = load_scalar_adapter(folder, adapter, dtype=torch.float32, attention="sdpa").merge_and_unload()
    merged = load_scalar_model(output.folder, dtype=torch.float32, attention="sdpa")
    torch.testing.assert_close(dict(apart.state_dict()), dict(merged.state_dict()), atol=1e-6, rtol=0)
    scores = _scores_by_transformers(output.folder, split_by_prompt(ROWS, 0)[1])
    assert stored_config(output.folder)["reward_mean"] == pytest.approx(scores.mean().item(), abs=1e-4)
    assert output.metrics["held_out_accuracy"] == 1.0


def test_the_language_model_term_of_an_untied_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="tied embeddings"):
        _run(tmp_path / "run", _inputs(tmp_path, tied=False), _config(language_model_coefficient=0.5))
