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
                f"settings and data give {expected} {name}, but the stage counted {counted}: nothing is published; "
                "this is a defect: report it, and run again with `checkpoint.resume: false`"
            )
