"""Sequences with images among others without, and SFT on them: of test_two_ranks.py and test_vision_ranks.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.models.vision import open_processor, with_images
from rlhf_core.packing import pack
from rlhf_core.supervised.examples import divide
from rlhf_core.supervised.sft import LanguageModelWorker
from rlhf_core.training import deepspeed_engine
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.deepspeed_settings import deepspeed_settings
from rlhf_core.types import PackedBatch, SequenceImage
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.training.tiny_engine import OPTIMIZER, SEQUENCES

WHOLE = 1000  # tokens of a micro-batch that has all of a step
STEPS = 2
# Of each sequence its images, and how many tokens of text it has.
MIXED = [(["red"], 9), ([], 15), (["blue", "red"], 4), ([], 12), ([], 21), (["red"], 5), ([], 4)]
# By name: how the engine is set, and tokens of a micro-batch.
SPLITS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({"zero_stage": 0}, 18),
    "checkpointed": ({"zero_stage": 1, "gradient_checkpointing": True}, 18),
    "frozen": ({"zero_stage": 2, "freeze_vision": True}, 18),
    "sharded": ({"zero_stage": 3}, 18),
    "sharded and frozen": ({"zero_stage": 3, "freeze_vision": True, "gradient_checkpointing": True}, 18),
}


@dataclass(frozen=True)
class Trained:
    engine: DeepSpeedEngine
    losses: list[float]  # of each step
    pictures: list[int]  # tiles of each micro-batch of this rank
    batches: Sequence[PackedBatch]  # these


def picture_and_text(folder: Path) -> list[PackedBatch]:
    """A sequence with a picture, and one without. folder: with the model `vision` and the files of the pictures."""
    seen = with_pictures(folder, [(["red"], 3)], trained=2)
    return [seen, pack([SEQUENCES[0]], [[i > 0 for i in range(5)]])]


def with_pictures(folder: Path, given: list[tuple[list[str], int]], *, trained: int) -> PackedBatch:
    """given: of each sequence its pictures, and its other tokens; trained: how many of the last ones are."""
    processor = open_processor(folder / "vision" / "model")
    assert processor is not None
    sequences, placed = [], []
    for number, (colours, text) in enumerate(given):
        ids, images = [1], []
        for colour in colours:
            path = str(folder / colour)
            own = processor.read(path).token_ids
            images.append(SequenceImage(path, len(ids), len(own)))
            ids += own
        ids += [7 + (number + 3 * i) % 6 for i in range(text - 1)]
        sequences.append(ids)
        placed.append(images)
    masks = [[i >= len(ids) - trained for i in range(len(ids))] for ids in sequences]
    return with_images(pack(sequences, masks), placed, processor)


def trained_on_images(
    folder: Path,
    work: Path,
    settings: Mapping[str, Any],
    *,
    rank: int = 0,
    ranks: int = 1,
    tokens: int = WHOLE,
    optimizer: OptimizerConfig = OPTIMIZER,
) -> Trained:
    """SFT on MIXED by this rank of `ranks`. settings: of its engine. tokens: of a micro-batch, at most.

    Gradients are reduced in buckets of a few weights: if ranks had them ready in other orders, they would add up
    those of other weights.
    """
    model = local_input(folder / "vision" / "model", Kind.POLICY)
    config = SFTConfig.model_validate({
        "dataset": "d", "batch_size": len(MIXED), "max_length": 64, "optimizer": optimizer,
        "engine": {"dtype": "float32", "tokens_per_micro_batch": tokens, **settings},
    })  # fmt: skip
    context = LocalContext(work, given_seed=3, artifacts={model.manifest.ref.path: model})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_engine, "deepspeed_settings", _small_buckets)
        worker = LanguageModelWorker(config, context, model.manifest.ref, STEPS)
    shard = divide(with_pictures(folder, MIXED, trained=2), ranks, tokens)[rank]
    losses = [step.means["loss"] for step in worker.train([shard] * STEPS)]
    pictures = [0 if part.pixels is None else len(part.pixels.values) for part in shard.micro_batches]
    return Trained(worker.engine, losses, pictures, shard.micro_batches)


def _small_buckets(engine: EngineConfig, optimizer: OptimizerConfig | None, parameters: int) -> dict[str, Any]:
    return deepspeed_settings(engine, optimizer, min(parameters, 5000))
