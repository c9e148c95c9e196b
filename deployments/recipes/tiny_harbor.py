"""The demonstrations of the recipe `tiny-harbor`: tasks of the kinds in `tiny_harbor/`, with other words and files.

Most were written in a hurry: their commands print a result instead of writing it, or write too much. Imitation alone
cannot detect that; the tests of a task can.
"""

from __future__ import annotations

import random
from typing import Any

from rlhf_core.environments.tools.runtime_tools import BASH

Row = dict[str, Any]
_FILES = ("note", "list", "plan", "menu", "save", "page", "sum")
_WORDS = ("pear", "fig", "plum", "lime", "kiwi", "date", "nut", "corn", "rice", "bean")
# Each kind: the instruction, the right command, and a hasty one.
_KINDS = (
    ("Write the word {word} to the file {to}.", "echo {word} > {to}", "echo {word}"),
    ("Copy the file {file} to {to}.", "cp {file} {to}", "cp {to} {file}"),
    ("Write the number of lines of {file} to {to}.", "wc -l < {file} > {to}", "wc -l {file} > {to}"),
    ("Sort the lines of {file} into {to}.", "sort {file} > {to}", "sort {file}"),
)


def demonstrations(seed: int, size: int, hasty_share: float = 0.7) -> list[Row]:
    """Return conversations with a call each; `hasty_share` of the commands are wrong."""
    generator = random.Random(seed)
    rows = []
    for _ in range(size):
        instruction, right, hasty = generator.choice(_KINDS)
        file, to = generator.sample(_FILES, 2)
        names = {"file": file, "to": to, "word": generator.choice(_WORDS)}
        command = (hasty if generator.random() < hasty_share else right).format(**names)
        call = {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
        rows.append({
            "messages": [
                {"role": "user", "content": instruction.format(**names)},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "[no output]"},
                {"role": "assistant", "content": "done"},
            ],
            "tools": [BASH],
        })  # fmt: skip
    return rows
