"""Values of a user's code as JSON."""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Any

from rlhf_core.system.image_decoding import encoded_image


def as_json(value: Any) -> Any:
    """Convert a number of numpy or torch to JSON, and an image, file bytes or PIL, to a data URL.

    For `default` of json.dumps. Raises TypeError for any other value.
    """
    if hasattr(value, "save") and hasattr(value, "convert"):
        value = encoded_image(value)
    if isinstance(value, bytes):
        return f"data:image/png;base64,{base64.b64encode(value).decode()}"
    with suppress(AttributeError, ValueError, RuntimeError):  # it is none, or several
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a text, number, list, mapping or image")
