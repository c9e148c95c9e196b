"""Every architecture that reads images through the stages that need no engine: each learns from pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.kto import KTOConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.config.stages.reward_models import RewardModelConfig
from rlhf_core.contract import Input
from rlhf_core.data.reading import read_rows
from rlhf_core.models.folders.folder import read_config
from rlhf_core.models.folders.vision_models import VISION_MODELS
from rlhf_core.models.loading import load_scalar_model
from rlhf_core.models.packed import ScalarModel
from rlhf_core.models.vision import open_processor
from rlhf_core.stages import kto, preference, reward_model, sft
from rlhf_core.supervised.encoding import row_images
from rlhf_core.supervised.pairs import pack_pairs, pair_example
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.stages.supervised_runs import context_of, inline
from tests.rlhf_core.stages.vision_runs import COLOURS, ENGINE_SETTINGS, OPTIMIZER_SETTINGS, made, pairs, rows, valid
from tests.rlhf_core.vision_folders import BUILDERS, vision_folder

PARTS = "qwen2_5_vl"  # the one that the tier of parts runs
VALIDATION = {"dataset": "d", "every_steps": 12, "metric": "accuracy"}
SETTINGS = {
    "dataset": "d", "batch_size": 8, "max_length": 160, "log_every": 2, "optimizer": OPTIMIZER_SETTINGS,
    "engine": ENGINE_SETTINGS,
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.parts if kind == PARTS else pytest.mark.endurance("architectures"))
        for kind in BUILDERS
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Input:
    return local_input(vision_folder(request.param, tmp_path_factory.mktemp(request.param)), Kind.BASE_MODEL)


def inputs_of(model: Input, folder: Path, data_format: str, given: list[dict[str, Any]]) -> dict[str, Input]:
    dataset = local_input(made(folder / "data", data_format, given).folder, Kind.DATASET)
    return {"model": model, "dataset": dataset, "validation.dataset": dataset}


def test_sft_learns_what_is_in_the_pictures(model: Input, tmp_path: Path) -> None:
    inputs = inputs_of(model, tmp_path, "conversations", rows(40))
    settings = {**SETTINGS, "epochs": 8, "validation": {**VALIDATION, "metric": "loss"}}
    context = context_of(tmp_path / "sft", inputs)
    output = sft.run(valid(SFTConfig, settings), inputs, context, inline)
    assert output.metrics["validation_best"] < 0.1
    before, after = (load_file(folder / "model.safetensors") for folder in (model.folder, output.folder))
    assert before.keys() == after.keys()
    encoder = VISION_MODELS[read_config(model.folder)["model_type"]].encoder.removeprefix("model.")
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert any(encoder in name for name in changed)


@pytest.mark.slow("trains until it prefers")
def test_dpo_prefers_what_is_in_the_pictures(model: Input, tmp_path: Path) -> None:
    inputs = inputs_of(model, tmp_path, "preferences", pairs(rows(16)))
    losses = {"dpo": {"type": "dpo", "beta": 0.5}}
    settings = valid(PreferenceConfig, {**SETTINGS, "epochs": 12, "losses": losses, "validation": VALIDATION})
    inputs |= {"reference.model": model}
    output = preference.run(settings, inputs, context_of(tmp_path / "dpo", inputs), inline)
    assert output.metrics["validation_best"] == 1.0


@pytest.mark.slow("trains until it prefers")
@pytest.mark.endurance("architectures")
def test_kto_prefers_what_is_in_the_pictures(model: Input, tmp_path: Path) -> None:
    labelled = [
        {**row, "completion": colour, "label": colour == row["answer"]} for row in rows(16) for colour in COLOURS
    ]
    inputs = inputs_of(model, tmp_path, "unpaired", labelled) | {"reference.model": model}
    settings = valid(KTOConfig, {**SETTINGS, "epochs": 16, "beta": 0.5, "validation": VALIDATION})
    output = kto.run(settings, inputs, context_of(tmp_path / "kto", inputs), inline)
    assert output.metrics["validation_best"] > 0.9  # of 32; half of them after a step


def test_a_reward_model_tells_what_is_in_the_pictures(model: Input, tmp_path: Path) -> None:
    inputs = inputs_of(model, tmp_path, "preferences", pairs(rows(16)))
    settings = valid(RewardModelConfig, {**SETTINGS, "epochs": 12, "validation": VALIDATION})
    output = reward_model.run(settings, inputs, context_of(tmp_path / "rm", inputs), inline)
    assert output.metrics["accuracy"] == 1.0
    # The stored model, read again, tells them too.
    processor, tokenizer = open_processor(output.folder), load_tokenizer(output.folder)
    images, dataset = row_images(processor, inputs["dataset"].folder), inputs["dataset"].folder
    examples = [pair_example(tokenizer, row, images) for row in read_rows(dataset)]
    batch = pack_pairs(examples, processor=processor)
    stored = ScalarModel(load_scalar_model(output.folder, dtype=torch.float32, attention="sdpa").eval())
    with torch.no_grad():
        chosen, rejected = stored(batch)[batch.last_token_indices].view(-1, 2).unbind(1)
    assert bool((chosen > rejected).all())
