"""Decoding of images, the same for training, rollouts and environments. Imports PIL if it is installed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")  # modes of grey
_WITHOUT_RANGE = ("I", "F")  # PIL clips their values to 0..255, whatever they mean


def decoded_image(file: bytes | Path) -> Any:
    """Return the pixels, after `as_rgb`, of a file that the dataset stage has verified."""
    from PIL import Image

    with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as image:
        return as_rgb(image)


def encoded_image(picture: Any) -> bytes:
    """Encode a PIL image, after `as_rgb`, as PNG, which is lossless. Raises ValueError as `as_rgb` does."""
    written = io.BytesIO()
    as_rgb(picture).save(written, "PNG")
    return written.getvalue()


def as_rgb(image: Any) -> Any:
    """Convert a PIL image to RGB: rotated by its EXIF, on white if transparent, with the high 8 of 16 bits.

    Raises ValueError for a mode whose values have no known range.
    """
    from PIL import Image

    if image.mode in _WITHOUT_RANGE:
        raise ValueError(f"a picture of the mode {image.mode} has no known range: convert it to L or RGB")
    image = _turned(image)
    if image.mode in _SIXTEEN_BITS:
        image = _with_8_bits(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        below = Image.new("RGB", image.size, "white")
        below.paste(image, mask=image.getchannel("A"))
        return below
    return image.convert("RGB")


def _turned(image: Any) -> Any:
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # EXIF that PIL cannot read is ignored; vLLM decodes such files without it, too
        return image


def _with_8_bits(image: Any) -> Any:
    """Convert to 8-bit grey, transparent at the file's transparent value."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    if (clear := image.info.get("transparency")) is None:
        return grey
    opaque = Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8))
    return Image.merge("LA", (grey, opaque))
