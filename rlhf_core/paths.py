"""Paths as a person writes them."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.errors import AlignmentError, StoreError


def user_path(text: str, error: type[AlignmentError] = StoreError, variable: str = "") -> Path:
    """`text` with `~` and `~user` replaced by the home folder. Raises `error` if there is none.

    variable: that of the environment which holds it.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        named = f"{variable}={text}" if variable else text
        raise error(f"{named}: there is no home folder of {text.partition('/')[0]}: write the path in full") from None
