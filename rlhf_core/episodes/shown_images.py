"""Images in messages of environments."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_core.chat.image_messages import content_parts, images_of, is_image_name, without_images
from rlhf_core.chat.rendering import Message
from rlhf_core.config.data.dataset import ImagesConfig
from rlhf_core.data.formats.base import RowError
from rlhf_core.data.formats.messages import read_messages
from rlhf_core.data.images import ImageReader
from rlhf_core.models.vision import ImageProcessor, RowImages
from rlhf_core.rollout.engine import RequestImage
from rlhf_core.types import Prompt, SequenceImage


def request_images(images: Sequence[SequenceImage]) -> list[RequestImage]:
    """Return the images as in an engine's request."""
    return [RequestImage(Path(image.path).read_bytes(), image.start, image.length, image.written) for image in images]


def row_with_data_urls(prompt: Prompt) -> dict[str, Any]:
    """Return the row of `prompt`, with images as in requests of the OpenAI API: parts with data URLs."""
    row = dict(prompt.row)
    if prompt.images:
        urls = {(file := Path(image.path)).name: {"url": _data_url(file)} for image in prompt.images}
        row["prompt"] = [_with_parts(message, urls) for message in row["prompt"]]
    return row


def _with_parts(message: Message, urls: Mapping[str, Any]) -> Message:
    if "images" not in message:
        return message
    shown = iter(message["images"])
    parts = [
        part if part["type"] == "text" else {"type": "image_url", "image_url": urls[next(shown)]}
        for part in content_parts(message)
    ]
    return {**without_images(message), "content": parts}


def _data_url(file: Path) -> str:
    from PIL import Image

    with Image.open(file) as image:
        kind = image.get_format_mimetype()
    return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


class ShownImages:
    """Reads and keeps the images of all episodes of a stage."""

    def __init__(self, processor: ImageProcessor, folder: Path, most: int) -> None:
        """processor: the policy's. folder: keeps the images, may be that of a killed job. most: images an episode."""
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.tokens = frozenset((processor.image_token_id, processor.feature_token_id))
        self._reader = ImageReader(ImagesConfig(), None, folder)
        self._rows = RowImages(processor, folder, most)

    def canonical(self, message: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
        """Return `message` with content as in canonical rows. It may contain images of its row's prompt, too.

        Raises RowError for an invalid image, or an unknown hash.
        """
        if isinstance(message["content"], str):
            digests = message["images"]
            if not isinstance(digests, list):
                raise RowError(f"`images` is {digests!r:.100}, and no list: show an image as a part of `content`")
            for digest in digests:
                self._keep(digest, prompt)
            return dict(message)
        return self.message(message)

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return `message`, whose content is a list of parts, as in canonical rows. Raises RowError as `canonical`."""
        (read,) = read_messages(self._reader({"messages": [message]})["messages"], "messages")
        return read

    def require_few(self, count: int) -> None:
        """Raise ConversationError if a sequence has more images than engines accept."""
        self._rows.require_few(count)

    def read(self, value: Any, place: str) -> str:
        """Read and keep the image `value`, in any form that a row allows; return the file's SHA-256.

        Raises RowError, which names the place, if it is not an image, or too large.
        """
        return self._reader.read(value, place)

    def expanded(
        self, token_ids: Sequence[int], messages: Sequence[Message], start: int = 0, before: int = 0
    ) -> tuple[list[int], tuple[SequenceImage, ...]]:
        """Expand the image placeholders in `token_ids`, the rendered `messages`. Returns the tokens and the images'
        positions.

        start: position of the tokens in the sequence; before: number of images before them.
        Raises ConversationError if the template does not render each image once, or if there are too many.
        """
        digests = images_of(messages)
        self._rows.require_few(before + len(digests))
        ids, _, placed = self._rows.expanded(token_ids, [False] * len(token_ids), digests)
        return ids, tuple(replace(image, start=start + image.start) for image in placed)

    def _keep(self, digest: Any, prompt: Prompt) -> None:
        paths_by_digest = {Path(image.path).name: image.path for image in prompt.images}
        if not is_image_name(digest):
            raise RowError(
                f"`images` has {digest!r:.100}, which is not a SHA-256: show an image as a part of `content`"
            )
        if (self._folder / digest).is_file():
            return
        if digest not in paths_by_digest:
            raise RowError(f"`images` has {digest}, which is not an image of the row: show it as a part of `content`")
        self._reader.read(Path(paths_by_digest[digest]).read_bytes(), "images")
