"""Preflight checks of rows with images: whether stage and model read images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.chat.image_messages import images_of_row
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.data.reading import NO_IMAGES
from rlhf_core.data.sources.base import Located
from rlhf_core.errors import RecipeError
from rlhf_core.models.folders.vision_models import reads_images
from rlhf_core.preflight.data import Use
from rlhf_core.preflight.model import BaseModel


def check_images(
    uses: list[Use], samples: Mapping[str, list[Located]], models: Mapping[str, BaseModel]
) -> Iterator[str]:
    """Yield a problem for each setting of a dataset with images that its stage or its model cannot read.

    uses: also of datasets that stages make. models: available base models, by node.
    """
    makers = {use.node.section: use for use in uses if use.dataset == use.node.config.prompts_of}
    for use in uses:
        if problem := next(_problems(use, makers, samples, models.get(use.node.name)), None):
            yield f"{use.setting}: {problem}"


def _problems(
    use: Use, makers: Mapping[str, Use], samples: Mapping[str, list[Located]], model: BaseModel | None
) -> Iterator[str]:
    """Yield each row with images, and the reason why it cannot be read."""
    config = use.node.config
    for where, row in _rows_with_images(use.dataset, makers, samples):
        if not use.node.stage.reads_images:
            yield f"{where}, and {use.reader} reads text alone: {NO_IMAGES}"
        elif model is not None and not reads_images(model.settings):
            yield f"{where}, and its model reads text alone: take a model that reads images, or drop such rows"
        elif settings := _text_readers(config, row):
            yield f"{where}, and {use.node.section}.{settings[0]} reads text alone: remove it"


def _text_readers(config: StageConfig, row: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        return config.text_readers_of(row)
    except RecipeError:  # there is no environment for the row: check_rewards reports it
        return ()


def _rows_with_images(
    dataset: str, makers: Mapping[str, Use], samples: Mapping[str, list[Located]]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a dataset that have images, each with a clause that names its place; of a dataset made by a
    stage, the rows whose prompts it keeps.

    makers: the use of its dataset by each stage that makes one. Yields nothing if no row is known to have images, or an
    earlier stage rejects them.
    """
    result = dataset
    while dataset in makers and dataset not in samples:
        maker = makers[dataset]
        if not maker.node.stage.reads_images or maker.node.config.text_readers:
            return
        dataset = maker.dataset
    kept = f", which `{result}` keeps" if result != dataset else ""
    for where, row in samples.get(dataset, []):
        if images_of_row(row):
            yield f"{where} in `data.{dataset}` has images{kept}", row
