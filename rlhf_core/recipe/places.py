"""Source positions of a recipe's values: the line of a file, or the override on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

Override = tuple[tuple[str, ...], str]  # the keys that it sets, and its text

_MERGE = "<<"
_SHOWN_OVERRIDES = 3


@dataclass(frozen=True)
class Places:
    files: Sequence[Path]  # the recipe's, and those that it extends
    overrides: Sequence[Override] = ()

    def of(self, location: Sequence[Any]) -> str:
        """Return the source position of the value at `location`, a path of keys and indices, or of its nearest parent;
        of a value changed inside by overrides, these too.
        """
        lines_by_file = [(file, _lines(root, location)) for file, root in self._roots.items()]
        file, lines = max(lines_by_file, key=lambda item: len(item[1]))  # of equals the first
        for keys, text in reversed(self.overrides):
            common = _common(keys, location)
            if common == len(keys) or common > len(lines):  # it sets the value, or the section that the file lacks
                return f"override `{text}`"
        inside = [f"`{text}`" for keys, text in self.overrides if _common(keys, location) == len(location) > 0]
        place = f"{file} line {lines[-1]}" if lines else str(file)
        return place + (f" with override {', '.join(inside[:_SHOWN_OVERRIDES])}" if inside else "")

    @cached_property
    def _roots(self) -> dict[Path, Node | None]:
        """Parsed YAML trees of the files read so far."""
        yaml = YAML(typ="safe", pure=True)
        return {file: yaml.compose(file.read_text(encoding="utf-8-sig")) for file in self.files}


def _common(keys: Sequence[str], location: Sequence[Any]) -> int:
    """Return the length of the common prefix of both."""
    alike = [key == str(part) for key, part in zip(keys, location, strict=False)]
    return [*alike, False].index(False)


def _lines(node: Node | None, location: Sequence[Any]) -> list[int]:
    """Return the line of each part of the location that exists."""
    lines = []
    for part in location:
        item = _item(node, part) if node is not None else None
        if item is None:
            break
        line, node = item
        lines.append(line)
    return lines


def _item(node: Node, part: Any) -> tuple[int, Node] | None:
    """Return the first line of the item `part` of `node`, and the item."""
    if isinstance(node, SequenceNode):
        inside = isinstance(part, int) and part < len(node.value)
        return (node.value[part].start_mark.line + 1, node.value[part]) if inside else None
    if not isinstance(node, MappingNode):
        return None
    for key, value in node.value:
        if key.value == str(part):
            return key.start_mark.line + 1, value
    for key, value in node.value:
        if key.value == _MERGE:
            merged = value.value if isinstance(value, SequenceNode) else [value]
            merged_item = next((item for other in merged if (item := _item(other, part)) is not None), None)
            if merged_item is not None:
                return merged_item
    return None
