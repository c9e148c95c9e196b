"""Small pictures for tests, sequences that show them, and a small model that reads them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from transformers import AutoTokenizer, Idefics3ImageProcessorPil, Idefics3Processor

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import encode_completion, load_tokenizer
from rlhf_core.chat.image_messages import IMAGE
from rlhf_core.config.stages.base_model import BaseModelConfig, ScratchModel, ScratchVision
from rlhf_core.contract import Input
from rlhf_core.models.vision import ImageProcessor, RowImages, with_images
from rlhf_core.packing import pack
from rlhf_core.stages import base
from rlhf_core.types import PackedBatch
from tests.rlhf_core.stages.context import LocalContext, local_input


def picture(colour: str, size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    """The file of a rectangle of this colour on white."""
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).rectangle((5, 5, size[0] - 8, size[1] - 8), fill=colour)
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def vision_model(folder: Path, *, seed: int = 0, tied: bool = True, words: tuple[str, ...] = ()) -> Input:
    """An Idefics3 of 2 layers, with the word-level tokenizer; an image is 4 tokens with 3 around them."""
    source = ScratchModel(
        type="scratch", words=("red", "blue", *words), hidden_size=64, intermediate_size=96, layers=2, heads=2,
        context_length=96, tie_word_embeddings=tied, vision=ScratchVision(hidden_size=64, intermediate_size=64),
    )  # fmt: skip
    output = base.run(BaseModelConfig(source=source, dtype="float32"), {}, LocalContext(folder, given_seed=seed))
    return local_input(output.folder, Kind.BASE_MODEL)


def tiled_vision_model(folder: Path) -> Input:
    """As `vision_model`, but an image is up to four tiles of 4 tokens with marks between them, and one more, the whole
    image: as SmolVLM's processor cuts it."""
    marks = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    model = vision_model(folder, words=(*marks, "<global-img>", "\n"))
    cutting = Idefics3ImageProcessorPil(
        do_image_splitting=True, size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
    )
    tokenizer = AutoTokenizer.from_pretrained(model.folder, local_files_only=True)
    Idefics3Processor(cutting, tokenizer, image_seq_len=4).save_pretrained(model.folder)
    return model


# The images of each sequence: two sequences of one prompt, one of text alone, one with several images.
IMAGES = (["red"], ["red"], [], ["blue", "red"])


def packed_with_pictures(folder: Path, pictures: Path, processor: ImageProcessor) -> PackedBatch:
    """Return the sequences of IMAGES, packed. folder: of the model; pictures: with a file for each colour."""
    tokenizer = load_tokenizer(folder)
    images = RowImages(processor, pictures)
    sequences, masks, placed = [], [], []
    for index, colours in enumerate(IMAGES):
        message: dict[str, Any] = {"role": "user", "content": f"{IMAGE * len(colours)}{index}?"}
        if colours:
            message["images"] = colours
        ids, mask, found = images.expanded(*encode_completion(tokenizer, [message], "red" * (index + 1)), colours)
        sequences.append(ids)
        masks.append(mask)
        placed.append(found)
    return with_images(pack(sequences, masks), placed, processor)
