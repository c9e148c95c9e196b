"""Images beside tokens: read by a model's own processor, and put in place of their placeholder tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlhf_core.errors import ConversationError, StageError, reason_of
from rlhf_core.mesh import current_mesh
from rlhf_core.models.folders.folder import read_config
from rlhf_core.models.folders.vision_models import VISION_MODELS, reads_images
from rlhf_core.models.output_head import backbone
from rlhf_core.models.sharded_loading import is_divided
from rlhf_core.models.vision_models import ARCHITECTURES, ReadImage
from rlhf_core.system.image_decoding import decoded_image
from rlhf_core.types import PackedBatch, Pixels, SequenceImage

B = TypeVar("B", bound=PackedBatch)

_CACHED_BYTES = 2**28  # of the pixels that a processor keeps


class ImageProcessor:
    """The processor of one model. Images are RGB; the model's folder determines their resizing and tiles."""

    def __init__(self, folder: Path) -> None:
        """Raises StageError if the files in `folder` make no processor."""
        self._folder = folder
        self._model = ARCHITECTURES[read_config(folder)["model_type"]]
        try:
            self._processor = self._model.open_processor(folder)
        except Exception as error:  # the library may raise anything; all mean that the folder has none
            raise StageError(
                f"{folder}: processor_config.json and preprocessor_config.json make no processor of images: fetch them "
                f"again ({reason_of(error)})"
            ) from error
        self.image_token_id: int = self._processor.image_token_id  # which a template writes for an image
        self.feature_token_id = self._model.feature_token_id(self._processor)  # which an image's features replace
        self.merges = self._model.merges(self._processor)
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
        return self._model.read(self._processor, decoded_image(Path(path)))


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
        if self.processor is None or not (digests or self.processor.image_token_id in ids):
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
        for each, is_trained, following in zip(ids, mask, [*ids[1:], None], strict=True):
            if each == self.processor.image_token_id:
                path = str(self.folder / next(left))
                self._place(path, tokens, trained, images)
                continue
            # Between two images it is merged with the second one, as engines do.
            follows = _ends_with_image(tokens, images) and following != self.processor.image_token_id
            merged = self.processor.merges.get((tokens[-1], each)) if follows else None
            if merged is None or is_trained:
                tokens.append(each)
                trained.append(is_trained)
                continue
            tokens[-1] = merged
            images[-1] = replace(images[-1], written=(*images[-1].written, each))
        placeholder = (self.processor.image_token_id,)
        return tokens, trained, tuple(replace(i, written=()) if i.written == placeholder else i for i in images)

    def _place(self, path: str, tokens: list[int], trained: list[bool], images: list[SequenceImage]) -> None:
        """Append an image. Its first token and the last one before it are one where the tokenizer merges them."""
        assert self.processor is not None
        own = list(self.processor.read(path).token_ids)
        written: tuple[int, ...] = (self.processor.image_token_id,)
        merged = self.processor.merges.get((tokens[-1], own[0])) if tokens and not trained[-1] else None
        if merged is not None and _ends_with_image(tokens, images):  # which has the merged token
            tokens[-1] = merged
            own = own[1:]
        elif merged is not None:
            own[0], written = merged, (tokens.pop(), *written)
            trained.pop()
        images.append(SequenceImage(path, len(tokens), len(own), written))
        tokens += own
        trained += [False] * len(own)


def _ends_with_image(tokens: Sequence[int], images: Sequence[SequenceImage]) -> bool:
    return bool(images) and images[-1].start + images[-1].length == len(tokens)


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
    first_part: dict[str, int] = {}
    num_parts, tiles = 0, list[Pixels]()
    for start, of_sequence in zip(starts, images, strict=True):
        for image in of_sequence:
            pixels = processor.read(image.path).pixels
            if image.path not in first_part:
                first_part[image.path] = num_parts
                num_parts += int(pixels.tokens.sum())
                tiles.append(pixels)
            span = slice(start + image.start, start + image.start + image.length)
            is_part = batch.input_ids[span] == processor.feature_token_id
            parts[span] = torch.where(is_part, first_part[image.path] + is_part.cumsum(0) - 1, -1)
    return replace(batch, image_parts=parts, pixels=Pixels.joined(tiles))


def with_features(model: Any, ids: Tensor, batch: PackedBatch, places: Tensor | None) -> dict[str, Any]:
    """Return the arguments of the model's layers in place of `ids`: the embeddings (rows, columns, d), with the vision
    encoder's features at the images' places, and those that its architecture needs beside them.

    model: a PreTrainedModel. ids: (rows, columns) int64, the tokens of `batch` in their layout; places: (N,) int64, the
    place of each token of the batch in the flattened `ids`; None: all in order. A sampled token is text, whatever its
    id.
    """
    embeddings: Tensor = model.get_input_embeddings()(ids)
    parts, pixels, architecture = batch.image_parts, batch.pixels, ARCHITECTURES.get(model.config.model_type)
    if architecture is None:
        raise StageError(
            f"sequences have images, but {type(model).__name__} reads text alone: take a model that sees them"
        )
    if parts is None or pixels is None:
        blank = image_features(model, architecture.blank(model.config).to(ids.device))
        return {"inputs_embeds": embeddings + 0.0 * sum(each.sum() for each in blank)}
    tokens = (parts >= 0).nonzero().squeeze(1)
    first, *later = (each[parts[tokens]].to(embeddings.dtype) for each in image_features(model, pixels))
    targets = tokens if places is None else places[tokens]
    is_image = torch.zeros_like(ids, dtype=torch.bool)
    is_image.view(-1)[targets] = True
    return {
        "inputs_embeds": embeddings.flatten(0, 1).index_copy(0, targets, first).view_as(embeddings),
        **architecture.arguments(later, is_image),
    }


def position_ids(model: Any, batch: PackedBatch) -> Tensor | None:
    """Return the positions of tokens along each axis, (axes, N) int64; None: the index in the sequence is all."""
    architecture = ARCHITECTURES.get(model.config.model_type)
    return None if architecture is None else architecture.position_ids(model.config, batch)


def layers_of(model: Any) -> nn.Module:
    """Return the module of a PreTrainedModel that gives the last hidden states."""
    architecture = ARCHITECTURES.get(model.config.model_type)
    return backbone(model) if architecture is None else architecture.layers(model)


def runs_encoder_always(model: Any) -> bool:
    """Return True if a batch without images runs the vision encoder too.

    Where ranks sum their gradients, each must have one of the same weights, if only of zero. Where ZeRO 3 divides
    weights, all ranks must gather the same ones in every forward.
    """
    if current_mesh().size == 1 or model.config.model_type not in VISION_MODELS:
        return False
    connectors = VISION_MODELS[model.config.model_type].connectors
    parameters = [p for connector in connectors for p in model.get_submodule(connector).parameters()]
    return any(is_divided(p) or (p.requires_grad and torch.is_grad_enabled()) for p in parameters)


def image_features(model: Any, pixels: Pixels) -> Sequence[Tensor]:
    """Return the features that replace image tokens, (T, d), tile after tile, and those that later layers add.

    Raises StageError if they are not as many as the tokens.
    """
    features = ARCHITECTURES[model.config.model_type].features(model, pixels)
    tokens = int(pixels.tokens.sum())
    if any(len(each) != tokens for each in features):
        raise StageError(
            f"the vision encoder gives {len(features[0])} features for {pixels.num_tiles} tiles of {tokens} tokens "
            "together: give config.json and processor of one model"
        )
    return features
