"""Images beside tokens: read by a model's own processor, and put in place of their placeholder tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf_core.errors import ConversationError, StageError, reason_of
from rlhf_core.mesh import current_mesh
from rlhf_core.models.folders.folder import read_config
from rlhf_core.models.folders.remote_code import VISION_CONNECTOR, VISION_MODELS, reads_images
from rlhf_core.system.image_decoding import decoded_image
from rlhf_core.types import PackedBatch, Pixels, SequenceImage

B = TypeVar("B", bound=PackedBatch)

_CACHED_BYTES = 2**28  # of the pixels that a processor keeps


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image in a model's input form."""

    token_ids: tuple[int, ...]  # its tokens, the marks around it included
    pixels: Pixels  # its tiles, each of which fills so many of the tokens that are `image_token_id`


class ImageProcessor:
    """The processor of one model. Images are RGB; the model's folder determines their resizing and tiles."""

    def __init__(self, folder: Path) -> None:
        """Raises StageError if the files in `folder` make no processor."""
        from transformers import AutoProcessor

        self._folder = folder
        try:
            self._processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the library may raise anything; all mean that the folder has none
            raise StageError(
                f"{folder}: processor_config.json and preprocessor_config.json make no processor of images: fetch them "
                f"again ({reason_of(error)})"
            ) from error
        self.image_token_id: int = self._processor.image_token_id
        self._kept: dict[str, ReadImage] = {}  # by path, those read longest ago first
        self._kept_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageProcessor, (self._folder,)  # another process opens its own

    def read(self, path: str) -> ReadImage:
        """Read an image. path: of a file that the dataset stage has verified. The most recent images are cached."""
        if path not in self._kept:
            self._kept[path] = self._read(path)
            self._kept_bytes += self._kept[path].pixels.values.nbytes
        image = self._kept[path] = self._kept.pop(path)  # the last one now
        while self._kept_bytes > _CACHED_BYTES and len(self._kept) > 1:
            oldest = self._kept.pop(next(iter(self._kept)))
            self._kept_bytes -= oldest.pixels.values.nbytes
        return image

    def _read(self, path: str) -> ReadImage:
        image = decoded_image(Path(path))
        inputs = self._processor(
            text=self._processor.image_token, images=[[image]], add_special_tokens=False, return_tensors="pt"
        )
        ids = inputs["input_ids"][0].tolist()
        values, mask = inputs["pixel_values"][0].float(), inputs["pixel_attention_mask"][0].bool()
        tokens, left = divmod(ids.count(self.image_token_id), len(values))
        if left or not tokens:
            raise StageError(f"the processor gives {len(values)} tiles and {ids.count(self.image_token_id)} tokens")
        return ReadImage(tuple(ids), Pixels(values, mask, tokens))


@dataclass(frozen=True, slots=True)
class RowImages:
    """Reader of a dataset's images for a stage. Picklable."""

    processor: ImageProcessor | None  # of the model; None: it reads text alone
    folder: Path  # with a file for each image, called by its SHA-256
    most: int | None = None  # images of a sequence that engines take, `rollout.max_images`; None: no engine reads them

    def require_few(self, count: int) -> None:
        """Raise ConversationError if a sequence has more images than engines accept."""
        if self.most is not None and count > self.most:
            raise ConversationError(f"it has {count} images, more than rollout.max_images={self.most}: raise it")

    def expanded(
        self, ids: Sequence[int], mask: Sequence[bool], digests: Sequence[str]
    ) -> tuple[list[int], list[bool], tuple[SequenceImage, ...]]:
        """Return `ids` and `mask` with all the tokens of each image in place of its placeholder, and their positions.
        digests: of the images, in order.

        Raises ConversationError if the template has not written each image once, or if there are too many.
        """
        self.require_few(len(digests))
        token = None if self.processor is None else self.processor.image_token_id
        if self.processor is None or not (digests or token in ids):
            return list(ids), list(mask), ()
        if (written := list(ids).count(self.processor.image_token_id)) != len(digests):
            raise ConversationError(
                f"the chat template writes {written} of {len(digests)} images: give the base stage a chat_template "
                "that writes each once"
            )
        tokens: list[int] = []
        trained: list[bool] = []
        images: list[SequenceImage] = []
        left = iter(digests)
        for each, is_trained in zip(ids, mask, strict=True):
            if each != token:
                tokens.append(each)
                trained.append(is_trained)
                continue
            path = str(self.folder / next(left))
            image_tokens = self.processor.read(path).token_ids
            images.append(SequenceImage(path, len(tokens), len(image_tokens)))
            tokens += image_tokens
            trained += [False] * len(image_tokens)
        return tokens, trained, tuple(images)


def open_processor(folder: Path) -> ImageProcessor | None:
    """Return the processor of the model in `folder`; None if it reads text only."""
    return ImageProcessor(folder) if reads_images(read_config(folder)) else None


def with_images(batch: B, images: Sequence[Sequence[SequenceImage]], processor: ImageProcessor | None) -> B:
    """Return `batch` with the images of each of its sequences. processor: of the model; not needed without images."""
    if not any(images):
        return batch
    assert processor is not None  # the rows of a model that reads text alone have no images
    starts = (batch.sequence_lengths.cumsum(0) - batch.sequence_lengths).tolist()
    parts = torch.full_like(batch.input_ids, -1)
    first_tile: dict[str, int] = {}
    tiles: list[Pixels] = []
    for start, of_sequence in zip(starts, images, strict=True):
        for image in of_sequence:
            pixels = processor.read(image.path).pixels
            if image.path not in first_tile:
                first_tile[image.path] = sum(len(each.values) for each in tiles)
                tiles.append(pixels)
            span = slice(start + image.start, start + image.start + image.length)
            is_part = batch.input_ids[span] == processor.image_token_id
            row = first_tile[image.path] * pixels.tokens_per_tile
            parts[span] = torch.where(is_part, row + is_part.cumsum(0) - 1, -1)
    return replace(batch, image_parts=parts, pixels=_joined(tiles))


def _joined(tiles: Sequence[Pixels]) -> Pixels:
    return Pixels(
        torch.cat([each.values for each in tiles]), torch.cat([each.mask for each in tiles]), tiles[0].tokens_per_tile
    )


def embedded(model: Any, ids: Tensor, batch: PackedBatch, places: Tensor | None) -> Tensor:
    """Return the embeddings (rows, columns, d) of `ids`, with the vision encoder's features at the images' places.

    model: a PreTrainedModel. ids: (rows, columns) int64, the tokens of `batch` in their layout; places: (N,) int64, the
    place of each token of the batch in the flattened `ids`; None: all in order. A sampled token is text, whatever its
    id.
    """
    embeddings: Tensor = model.get_input_embeddings()(ids)
    parts, pixels = batch.image_parts, batch.pixels
    if parts is None or pixels is None:
        return embeddings + 0.0 * image_features(model, _blank(model).to(ids.device)).sum()
    tokens = (parts >= 0).nonzero().squeeze(1)
    features = image_features(model, pixels)[parts[tokens]].to(embeddings.dtype)
    targets = tokens if places is None else places[tokens]
    return embeddings.flatten(0, 1).index_copy(0, targets, features).view_as(embeddings)


def runs_encoder_always(model: Any) -> bool:
    """Whether a batch without images needs the vision encoder, for a gradient of zero: where ranks sum their gradients,
    each must have one of the same weights.
    """
    if not torch.is_grad_enabled() or current_mesh().size == 1:
        return False
    if model.config.model_type not in VISION_MODELS:
        return False
    return any(parameter.requires_grad for parameter in model.get_submodule(VISION_CONNECTOR).parameters())


def _blank(model: Any) -> Pixels:
    """Return one tile that is not padding."""
    config = model.config
    side = config.vision_config.image_size
    tokens = (side // config.vision_config.patch_size // config.scale_factor) ** 2
    return Pixels(torch.ones(1, 3, side, side), torch.ones(1, side, side, dtype=torch.bool), tokens)


def image_features(model: Any, pixels: Pixels) -> Tensor:
    """Return the features that replace image tokens, (I · tokens_per_tile, d), tile after tile."""
    output = model.get_image_features(
        pixel_values=pixels.values.unsqueeze(0), pixel_attention_mask=pixels.mask.unsqueeze(0), return_dict=True
    )
    features: Tensor = output.pooler_output
    if features.shape[:2] != (len(pixels.values), pixels.tokens_per_tile):
        raise StageError(
            f"the vision encoder gives features {tuple(features.shape)} for {len(pixels.values)} tiles of "
            f"{pixels.tokens_per_tile} tokens: give config.json and processor of one model"
        )
    return features.flatten(0, 1)
