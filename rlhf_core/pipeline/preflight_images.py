"""Rows with images before anything runs: does the stage that reads them take images, and does its model?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlhf_core.data.image_messages import images_of_row
from rlhf_core.data.reading import NO_IMAGES
from rlhf_core.models.remote_code import reads_images
from rlhf_core.pipeline.preflight_data import Located, Use
from rlhf_core.pipeline.preflight_model import BaseModel


def check_images(
    uses: list[Use], samples: Mapping[str, list[Located]], models: Mapping[str, BaseModel]
) -> Iterator[str]:
    """One sentence for each setting that names a dataset with images which its stage or its model cannot read.

    uses: also of datasets that stages make. models: by node, of those whose base model is at hand.
    """
    makers = {use.node.section: use for use in uses if use.dataset == use.node.config.prompts_of}
    for use in uses:
        where = _first_image(use.dataset, makers, samples)
        if where is None:
            continue
        model = models.get(use.node.name)
        if not use.read_by.reads.images:
            problem = f"{use.reader} reads text alone: {NO_IMAGES}"
        elif model is not None and not reads_images(model.settings):
            problem = "its model reads text alone: take a model that reads images, or drop such rows"
        elif settings := use.node.config.text_readers:
            problem = f"{use.node.section}.{settings[0]} reads text alone: leave it out"
        else:
            continue
        yield f"{use.setting}: {where}, and {problem}"


def _first_image(dataset: str, makers: Mapping[str, Use], samples: Mapping[str, list[Located]]) -> str | None:
    """Which row of a dataset has images; of one that a stage makes, which row of that whose prompts it keeps.

    makers: the use of its dataset by each stage that makes one. None: no row is known to have any, or a stage before
    refuses them.
    """
    made = dataset
    while dataset in makers and dataset not in samples:
        maker = makers[dataset]
        if not maker.read_by.reads.images or maker.node.config.text_readers:
            return None
        dataset = maker.dataset
    where = next((where for where, row in samples.get(dataset, []) if images_of_row(row)), None)
    if where is None:
        return None
    return f"{where} in `data.{dataset}` has images" + (f", which `{made}` keeps" if made != dataset else "")
