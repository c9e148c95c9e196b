"""Images of a dataset: their sources, and the selection of those that become files of its artifact."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.chat.image_messages import images_of_row
from rlhf_core.config.data.dataset import IMAGE_SUFFIXES, DatasetConfig
from rlhf_core.contract import StageContext
from rlhf_core.data.images import ImageReader
from rlhf_core.data.reading import IMAGES_FOLDER, iterate_rows
from rlhf_core.data.sources.remote import fetch_folder


def open_reader(config: DatasetConfig, context: StageContext, store: Path) -> ImageReader:
    """Return the reader of the rows' images, which are kept in the new folder `store`.

    Raises StageError for a remote folder whose files differ from those of the key.
    """
    store.mkdir()
    named, folder = config.images.folder, None
    if named is not None and "://" in named:
        folder = context.workdir / "named_images"
        fetch_folder(named, context.pin(named), IMAGE_SUFFIXES, folder)
    elif named is not None:
        folder = context.user_folder(named)
    return ImageReader(config.images, folder, store)


def move_images(store: Path, folder: Path) -> dict[str, int]:
    """Move and count the images of rows in the result. Those of other rows stay."""
    if not any(store.iterdir()):
        return {}
    named = {digest for row in iterate_rows(folder) for digest in images_of_row(row)}
    if not named:
        return {}
    (folder / IMAGES_FOLDER).mkdir()
    for digest in sorted(named):
        (store / digest).rename(folder / IMAGES_FOLDER / digest)
    return {"images": len(named)}
