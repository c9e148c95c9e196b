"""The one decoding of images: training, rollouts and environments see these pixels. Imports PIL where there is one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")  # modes of grey
_WITHOUT_RANGE = ("I", "F")  # PIL clips their values to 0..255, whatever they mean


def decoded_image(file: bytes | Path) -> Any:
    """The pixels of a file that the dataset stage has verified, as `as_rgb` makes them."""
    from PIL import Image

    with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as image:
        return as_rgb(image)


def encoded_image(picture: Any) -> bytes:
    """The pixels that `as_rgb` makes of a picture of PIL as a file: PNG loses none. Raises ValueError as it does."""
    written = io.BytesIO()
    as_rgb(picture).save(written, "PNG")
    return written.getvalue()


def as_rgb(image: Any) -> Any:
    """A picture of PIL turned as its EXIF says, white below transparency, with the high 8 of 16 bits, as RGB.

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
    except Exception:  # EXIF that PIL cannot read says nothing; vLLM decodes such files without it, too
        return image


def _with_8_bits(image: Any) -> Any:
    """Grey, and transparent where the value is the one that the file calls so."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    if (clear := image.info.get("transparency")) is None:
        return grey
    opaque = Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8))
    return Image.merge("LA", (grey, opaque))
