"""The interface of an architecture that reads images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.models.output_head import backbone
from rlhf_core.types import PackedBatch, Pixels


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image in a model's input form."""

    token_ids: tuple[int, ...]  # its tokens, the marks around it included
    pixels: Pixels  # its tiles, which fill those of the tokens that are `feature_token_id`


class VisionModel(ABC):
    """An architecture. N: tokens of a batch; I: tiles; T: tokens of all tiles; d: hidden size of the text model."""

    def open_processor(self, folder: Path) -> Any:
        """Return transformers' processor of the model in `folder`."""
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(folder, local_files_only=True)

    def feature_token_id(self, processor: Any) -> int:
        """Return the token that an image's features replace; templates may write another one for a whole image."""
        token: int = processor.image_token_id
        return token

    def merges(self, processor: Any) -> Mapping[tuple[int, int], int]:
        """Return the token that the tokenizer writes in place of two, one of an image and one of the text beside it, or
        of two images.
        """
        return {}

    def read(self, processor: Any, image: Any) -> ReadImage:
        """Read an image, a PIL image in RGB, with the model's own processor."""
        inputs = processor(text=processor.image_token, images=[[image]], add_special_tokens=False, return_tensors="pt")
        ids = inputs["input_ids"][0].tolist()
        return ReadImage(tuple(ids), self.pixels(inputs, ids.count(self.feature_token_id(processor))))

    @abstractmethod
    def pixels(self, inputs: Mapping[str, Any], tokens: int) -> Pixels:
        """Return the tiles of one image. inputs: the processor's; tokens: those that its features replace.

        Raises StageError if they do not belong together.
        """

    @abstractmethod
    def blank(self, config: Any) -> Pixels:
        """Return one tile of ones, as small as the model of this config reads."""

    @abstractmethod
    def inputs(self, pixels: Pixels) -> dict[str, Any]:
        """Return the tiles as arguments of the model's own forward."""

    def token_types(self, is_image: Tensor) -> dict[str, Any]:
        """Return the arguments that tell the model's own forward where images are. is_image: (rows, columns) bool."""
        return {}

    def features(self, model: Any, pixels: Pixels) -> Sequence[Tensor]:
        """Return the features of all tiles, tile after tile: of the embeddings, (T, d), and of each later layer that
        reads some, (T, d).
        """
        return [flattened(self.encoded(model, pixels).pooler_output)]

    def encoded(self, model: Any, pixels: Pixels) -> Any:
        """Return what the encoder of a PreTrainedModel, causal or scalar, makes of the tiles."""
        without_head: Any = backbone(model)
        return without_head.get_image_features(**self.inputs(pixels), return_dict=True)

    def position_ids(self, config: Any, batch: PackedBatch) -> Tensor | None:
        """Return the positions of tokens along each axis, (axes, N) int64; None: the index in the sequence is all."""
        return None

    def arguments(self, later: Sequence[Tensor], is_image: Tensor) -> dict[str, Any]:
        """Return further arguments of `layers`. later: of the features of image tokens, in order, those that layers
        after the embedding read; is_image: (rows, columns) bool, true at image tokens.
        """
        return {}

    def layers(self, model: Any) -> nn.Module:
        """Return the module that takes `inputs_embeds` and gives the last hidden states."""
        return backbone(model)


def flattened(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the features of all tiles (T, d). features: (I, tokens, d), or (tokens, d) of each tile."""
    return features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(list(features))
