"""Rows with images before anything runs: does the stage that reads them take images, and does its model?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlhf_core.config.rl import RLConfig
from rlhf_core.data.image_messages import images_of
from rlhf_core.data.reading import NO_IMAGES
from rlhf_core.models.remote_code import reads_images
from rlhf_core.pipeline.preflight_data import Located, Use
from rlhf_core.pipeline.preflight_model import BaseModel


def check_images(
    uses: list[Use], samples: Mapping[str, list[Located]], models: Mapping[str, BaseModel]
) -> Iterator[str]:
    """One sentence for each setting that names a dataset with images which its stage or its model cannot read.

    models: by node, of those whose base model is at hand.
    """
    for use in uses:
        where = next((where for where, row in samples.get(use.dataset, []) if _has_images(row)), None)
        if where is None:
            continue
        model = models.get(use.node.name)
        if not use.read_by.reads.images:
            problem = f"{use.reader} reads text alone: {NO_IMAGES}"
        elif model is not None and not reads_images(model.settings):
            problem = "its model reads text alone: take a model that reads images, or drop such rows"
        elif isinstance(use.node.config, RLConfig) and (settings := use.node.config.text_readers):
            problem = f"{use.node.section}.{settings[0]} reads text alone: leave it out"
        else:
            continue
        yield f"{use.setting}: {where} in `data.{use.dataset}` has images, and {problem}"


def _has_images(row: Mapping[str, object]) -> bool:
    return any(
        isinstance(value, list) and all(isinstance(each, dict) for each in value) and bool(images_of(value))
        for value in (row.get("messages"), row.get("prompt"))
    )
