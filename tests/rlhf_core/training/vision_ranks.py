"""Computes the answers of each of two ranks for tests/rlhf_core/training/test_vision_ranks.py.

FOLDER has a folder for each architecture, with its model `vision/model` and the files of the pictures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from rlhf_core.training.distributed import join_group
from tests.rlhf_core.training.mixed_images import Trained, trained_on_images
from tests.rlhf_core.training.ranks import Answer, write_answers
from tests.rlhf_core.training.tiny_engine import OPTIMIZER, loss, weights_of

TOKENS = 15  # of a micro-batch, so that ranks have images in different ones
# AdamW divides by the size of a gradient: one that is rounding alone would change weights as much as any other.
DAMPED = OPTIMIZER.model_copy(update={"epsilon": 1e-3})


def sharded(rank: int, folder: Path, kinds: list[str]) -> Iterator[Answer]:
    for kind in kinds:
        work = folder / f"work{rank}" / kind
        made = trained_on_images(
            folder / kind, work, {"zero_stage": 3}, rank=rank, ranks=2, tokens=TOKENS, optimizer=DAMPED
        )
        yield (
            kind,
            {"losses": made.losses, "pictures": made.pictures, "measured": measured(made)},
            weights_of(made.engine),
        )


def measured(made: Trained) -> float:
    """The loss of the trained model, over all ranks: by forwards without gradients."""
    return made.engine.measure(made.batches, lambda model, part: loss(model, part)[1])["loss"]


def main(rank: int, address: str, folder: Path, *kinds: str) -> None:
    torch.set_num_threads(1)
    join_group(rank=rank, size=2, address=address)
    write_answers(rank, folder, sharded(rank, folder, list(kinds)))
