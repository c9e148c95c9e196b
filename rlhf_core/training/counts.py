"""The counts that a stage proves before it ends."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.errors import StageError


def require_counts(counts: Mapping[str, tuple[int, int]]) -> None:
    """Raise StageError if something was not done as often as it is to be.

    counts: by what was counted, the number that settings and data give, and that of what was done.
    """
    for name, (expected, counted) in counts.items():
        if expected != counted:
            raise StageError(
                f"by its settings and its data the stage ends with {expected} {name}, and it has {counted}: nothing is "
                "published; run it with `checkpoint.resume: false`, and report this, since it is a fault of the stage"
            )
