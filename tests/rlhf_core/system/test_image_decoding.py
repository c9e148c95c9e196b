"""The pixels of each kind of file, pinned; vLLM's loader gives the same but for two kinds."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlhf_core.config.data.dataset import ImagesConfig
from rlhf_core.data.formats import RowError
from rlhf_core.data.images import ImageReader
from rlhf_core.errors import reason_of
from rlhf_core.processes.json_values import as_json
from rlhf_core.rollout.engine import Request, RequestImage, SamplingParameters
from rlhf_core.rollout.vllm.prompts import prompt_of
from rlhf_core.system.image_decoding import as_rgb, decoded_image, encoded_image

pytestmark = pytest.mark.parts

R, G, B, W, K = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)
ORIENTATION = 0x0112
CORNERS = [[R, G], [B, W]]


def pixels(image: Any) -> list[list[tuple[int, ...]]]:
    assert image.mode == "RGB"
    return [[tuple(pixel) for pixel in row] for row in np.asarray(image).tolist()]


def picture(rows: list[list[Any]], mode: str = "RGB") -> Image.Image:
    made = Image.new(mode, (len(rows[0]), len(rows)))
    made.putdata([pixel for row in rows for pixel in row])
    return made


def grey16(*values: int) -> Image.Image:
    return Image.fromarray(np.array([values], dtype=np.uint16))


def palette() -> Image.Image:
    made = picture([[0, 1, 2]], "P")
    made.putpalette([*R, *G, *B])
    return made


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def png(depth: int, colour: int, pixel: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """A file of one pixel, with chunks that PIL does not write."""
    header = struct.pack(">IIBBBBB", 1, 1, depth, colour, 0, 0, 0)
    parts = ((b"IHDR", header), *more, (b"IDAT", zlib.compress(b"\0" + pixel)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def turned(orientation: int, kind: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return file(picture(CORNERS), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))


KINDS = {
    "plain": (file(picture(CORNERS)), CORNERS),
    "exif-1": (turned(1), CORNERS),
    "exif-2": (turned(2), [[G, R], [W, B]]),
    "exif-3": (turned(3), [[W, B], [G, R]]),
    "exif-4": (turned(4), [[B, W], [R, G]]),
    "exif-5": (turned(5), [[R, B], [G, W]]),
    "exif-6": (turned(6), [[B, R], [W, G]]),
    "exif-7": (turned(7), [[W, G], [B, R]]),
    "exif-8": (turned(8), [[G, W], [R, B]]),
    "exif-6-webp": (turned(6, "WEBP"), [[B, R], [W, G]]),
    "rgba": (file(picture([[(*R, 255), (0, 0, 0, 0), (0, 0, 0, 128)]], "RGBA")), [[R, W, (127, 127, 127)]]),
    "rgba-webp": (file(picture([[(*R, 255), (0, 0, 0, 0)]], "RGBA"), "WEBP", lossless=True), [[R, W]]),
    "la": (file(picture([[(0, 255), (0, 0), (100, 255)]], "LA")), [[K, W, (100, 100, 100)]]),
    "l-one-clear": (file(picture([[0, 100]], "L"), transparency=0), [[W, (100, 100, 100)]]),
    "p": (file(palette()), [[R, G, B]]),
    "p-one-clear": (file(palette(), transparency=1), [[R, W, B]]),
    "p-all-alphas": (file(palette(), transparency=bytes([255, 0, 128])), [[R, W, (127, 127, 255)]]),
    "one-bit": (file(picture([[0, 255]], "1")), [[K, W]]),
    "cmyk-jpeg": (file(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100), [[R] * 8] * 8),
    "grey-jpeg": (file(Image.new("L", (8, 8), 90), "JPEG"), [[(90, 90, 90)] * 8] * 8),
}
# vLLM clips 16 bits to white, and shows the colour that a file without alpha calls transparent.
OTHERWISE_IN_VLLM = {
    "grey-16": (file(grey16(0, 255, 256, 40_000, 65_535)), [[K, K, (1, 1, 1), (156, 156, 156), W]]),
    "grey-16-one-clear": (file(grey16(0, 40_000, 65_535), transparency=0), [[W, (156, 156, 156), W]]),
    "rgb-one-clear": (file(picture([[K, R]]), transparency=K), [[W, R]]),
}
ALL = KINDS | OTHERWISE_IN_VLLM


@pytest.mark.parametrize("kind", ALL)
def test_training_engines_and_environments_see_the_pixels_as_they_are_meant(kind: str, tmp_path: Path) -> None:
    content, expected = ALL[kind]
    (tmp_path / "store").mkdir()
    digest = ImageReader(ImagesConfig(), None, tmp_path / "store").read(content, "image")
    assert pixels(decoded_image(tmp_path / "store" / digest)) == expected
    sampling = SamplingParameters(1.0, 1.0, max_tokens=1, stop_token_ids=())
    request = Request([1, 2], sampling, 0, [RequestImage(content, 0, 1)])
    (given,) = prompt_of(request, image_token=1)["multi_modal_data"]["image"]
    assert pixels(given) == expected
    url = as_json(Image.open(io.BytesIO(content)))  # of an environment
    (tmp_path / "shown").mkdir()
    shown = ImageReader(ImagesConfig(), None, tmp_path / "shown").read(url, "image")
    assert pixels(Image.open(tmp_path / "shown" / shown)) == expected
    opened = Image.open(io.BytesIO(content))  # of a data set of the hub, or of a function
    assert ImageReader(ImagesConfig(), None, tmp_path / "shown").read(opened, "image") == shown


@pytest.mark.parametrize("kind", ALL)
def test_vllm_decodes_the_file_likewise(kind: str) -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    content, expected = ALL[kind]
    assert (pixels(ImageMediaIO().load_bytes(content).media) == expected) == (kind in KINDS)
    ours = file(decoded_image(content))
    assert pixels(ImageMediaIO().load_bytes(ours).media) == expected


@pytest.mark.parametrize("kind", ALL)
def test_a_server_gives_vllm_the_pixels_of_training(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    from rlhf_core.rollout.vllm.images import decode_as_training_does

    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "http")  # to be restored
    decode_as_training_does()
    content, expected = ALL[kind]
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    loaded = asyncio.run(MEDIA_CONNECTOR_REGISTRY.load(envs.VLLM_MEDIA_CONNECTOR).fetch_image_async(url))
    assert pixels(loaded.media) == expected


def test_the_high_byte_of_16_bits_is_kept_for_colour_as_for_grey() -> None:
    content = png(16, 2, struct.pack(">HHH", 0xFFFF, 0x80FF, 0))  # PIL writes no 16-bit colour
    assert pixels(decoded_image(content)) == [[(255, 128, 0)]]
    assert pixels(as_rgb(grey16(0x80FF))) == [[(128, 128, 128)]]


def test_what_only_the_decoding_finds_is_an_error_of_its_row(tmp_path: Path) -> None:
    content = png(8, 3, b"\1", (b"PLTE", bytes([*R, *G])), (b"tRNS", bytes([5] * 300)))  # of 256 colours at most
    with pytest.raises(RowError, match="`image` is not an image that can be read"):
        ImageReader(ImagesConfig(), None, tmp_path).read(content, "image")
    assert list(tmp_path.iterdir()) == []


def test_pictures_without_a_known_range_are_refused() -> None:
    for mode in ("I", "F"):
        with pytest.raises(ValueError, match=f"mode {mode} has no known range: convert it to L or RGB"):
            encoded_image(Image.new(mode, (1, 1)))
        with pytest.raises(RowError, match=f"`image` is a picture that cannot be read .*mode {mode} has no"):
            ImageReader(ImagesConfig(), None).read(Image.new(mode, (1, 1)), "image")


def test_animations_are_refused() -> None:
    content = file(picture(CORNERS), "WEBP", save_all=True, append_images=[picture([[K, K], [K, K]])])
    with pytest.raises(RowError, match="`image` is animated"):
        ImageReader(ImagesConfig(), None).read(content, "image")


def test_broken_exif_turns_nothing() -> None:
    content = file(picture(CORNERS), exif=b"Exif\0\0MM\0*\0\0")
    assert pixels(decoded_image(content)) == CORNERS


def test_an_unknown_file_is_no_address_in_memory() -> None:
    with pytest.raises(RowError) as raised:
        ImageReader(ImagesConfig(), None).read(b"GIF89a", "images[2]")
    assert str(raised.value) == (
        "`images[2]` is not an image that can be read (its bytes are none of these): give PNG, JPEG, WEBP"
    )
    assert reason_of(ValueError(f"cannot read {io.BytesIO()}\n")) == "cannot read <_io.BytesIO>"
