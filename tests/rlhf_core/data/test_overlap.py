from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config.data import DataFormat
from rlhf_core.data.formats import canonical_row
from rlhf_core.data.overlap import PromptIndex, overlap_problem


def row(data_format: DataFormat, **source: Any) -> dict[str, Any]:
    return canonical_row(source, data_format, {})


HELD_OUT = PromptIndex({"test": [row("prompts", prompt="What is 1 + 2?"), row("prompts", prompt="Say  1 +\n22")]})


@pytest.mark.parametrize(
    ("candidate", "excluded"),
    [
        (row("prompts", prompt="What is  1 + 2?\n"), True),
        (row("prompts", prompt="What is 1 + 2? Now."), False),
        (
            row(
                "prompts",
                prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 1 + 22"}],
            ),
            True,
        ),
        (row("conversations", prompt="What is 1 + 2?", completion="3"), True),
        (row("conversations", prompt="Hm", completion="What is 1 + 2?"), False),
        (
            row(
                "conversations",
                messages=[
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Hi"},
                    {"role": "user", "content": "Say 1 + 22"},
                    {"role": "assistant", "content": "1 + 22"},
                ],
            ),
            True,
        ),
        (row("preferences", prompt="Say 1 + 22", chosen="a", rejected="b"), True),
        (row("text", text="Q: What is 1 + 2?\n3"), True),
        (row("text", text="Say 1 + 22"), True),
        (row("text", text="Say 1 + 223"), False),  # another number
        (row("text", text="xSay 1 + 22"), False),
        (row("text", text="short"), False),
    ],
)
def test_what_repeats_a_held_out_prompt(candidate: dict[str, Any], excluded: bool) -> None:
    assert (HELD_OUT.find(candidate) is not None) is excluded


def test_nothing_is_excluded_by_nothing() -> None:
    assert PromptIndex({}).find(row("text", text="a")) is None
