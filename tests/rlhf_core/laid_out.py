"""For tests of each layout of sequences: what a model would choose by itself is set."""

from __future__ import annotations

from typing import Literal, get_args

import pytest

from rlhf_core.models import layout_check, layouts

Layout = Literal["tree", "packed", "rows"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def use_layout(patch: pytest.MonkeyPatch, layout: Layout) -> None:
    """Models that are checked from here on have this layout. Those that a tree is right for have it by themselves."""
    if layout != "tree":
        patch.setattr(layout_check, "_tree_problem", lambda *_: "is not tried in this test")
        patch.setattr(layouts, "rows_are_cheaper", lambda model, batch: layout == "rows")
