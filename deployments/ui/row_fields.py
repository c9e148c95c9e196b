"""A row of a dataset, of any format, in the parts that a person reads: messages, sides to compare, texts, the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.ui.data_rows import StoredRow
from rlhf_core.chat.image_messages import IMAGE, is_image_name

_MESSAGES = ("messages", "prompt")
_PAIR = {"chosen": "high", "rejected": "low"}
_SHOWN_WITH = {"completions": (), "completion": ("label",), "steps": ("labels",)}  # what their sides say too


@dataclass(frozen=True, slots=True)
class Side:
    """One of several texts or conversations that stand side by side."""

    title: str
    messages: Sequence[Mapping[str, Any]] = ()
    text: str | None = None
    notes: Mapping[str, Any] | None = None
    shade: str = ""  # high, low, or nothing


@dataclass(frozen=True, slots=True)
class RowView:
    number: int  # from 0
    id: str
    characters: int
    images: int
    messages: Sequence[Mapping[str, Any]]
    sides: Sequence[Side]
    texts: Mapping[str, str]
    others: Mapping[str, str]  # as JSON
    is_cut: bool


def row_view(stored: StoredRow, most_characters: int) -> RowView:
    """Return a row with the first `most_characters` of its texts."""
    cut, row = _Cut(most_characters), stored.row
    used = {"id"}
    messages: list[Mapping[str, Any]] = []
    for column in _MESSAGES:
        if _is_conversation(row.get(column)):
            messages += cut.messages(row[column])
            used.add(column)
    sides = []
    for column, side in _sides(row, cut):
        sides.append(side)
        used |= {column, *_SHOWN_WITH.get(column, ())}
    texts, others = {}, {}
    for column, value in row.items():
        if column in used:
            continue
        if isinstance(value, str | int | float):
            texts[column] = cut.text(value if isinstance(value, str) else json.dumps(value))
        else:
            others[column] = cut.text(json.dumps(value, ensure_ascii=False, indent=1))
    return RowView(
        stored.number, str(row.get("id", "")), stored.characters, _images(row), messages, sides, texts, others, cut.was
    )


class _Cut:
    """Texts up to a number of characters in all."""

    def __init__(self, characters: int) -> None:
        self._left = characters
        self.was = False

    def text(self, text: str) -> str:
        shown = text[: self._left]
        self._left -= len(shown)
        if len(shown) == len(text):
            return text
        self.was = True
        return f"{shown}… {len(text) - len(shown)} more characters"

    def all_of(self, items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield items with their numbers as long as there is room."""
        for index, item in enumerate(items):
            if self._left <= 0:
                self.was = True
                return
            self._left -= 1  # so that items without a text end, too
            yield index, item

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return messages as the macro of the pages shows them."""
        shown: list[Mapping[str, Any]] = []
        for _, message in self.all_of(messages):
            content, images = message.get("content"), message.get("images")
            if not isinstance(content, str):
                content = "" if content is None else json.dumps(content, ensure_ascii=False, indent=1)
            each: dict[str, Any] = {"role": str(message.get("role", "")), "content": self.text(content)}
            if isinstance(images, list):
                digests = list(filter(is_image_name, images))
                each |= {"content": each["content"].replace(IMAGE, "[image]"), "images": digests}
            for name in ("reasoning_content", "tool_calls"):
                if value := message.get(name):
                    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                    each[name] = value if len(text) <= self._left else self.text(text)
                    self._left -= len(text) if each[name] is value else 0
            shown.append(each)
        return shown


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def _sides(row: Mapping[str, Any], cut: _Cut) -> Iterator[tuple[str, Side]]:
    """Yield the column of each side, and the side."""
    for column, shade in _PAIR.items():
        if _is_conversation(row.get(column)):
            yield column, Side(column, messages=cut.messages(row[column]), shade=shade)
        elif isinstance(row.get(column), str):
            yield column, Side(column, text=cut.text(row[column]), shade=shade)
    if isinstance(row.get("completion"), str) and isinstance(row.get("label"), bool):
        good = row["label"]
        yield "completion", Side("good" if good else "bad", text=cut.text(row["completion"]), shade=_shade(float(good)))
    completions, steps, labels = row.get("completions"), row.get("steps"), row.get("labels")
    if _is_conversation(completions):
        for index, each in cut.all_of(completions or ()):
            notes = {name: value for name, value in _flat(each) if isinstance(value, str | int | float)}
            yield "completions", Side(f"completion {index + 1}", text=cut.text(str(each.get("text", ""))), notes=notes)
    if isinstance(steps, list) and isinstance(labels, list) and len(steps) == len(labels):
        for index, step in cut.all_of(steps):
            label = labels[index]
            notes = {"label": "not judged" if label is None else str(label)}
            yield "steps", Side(f"step {index + 1}", text=cut.text(str(step)), notes=notes, shade=_shade(label))


def _flat(completion: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in completion.items():
        if isinstance(value, dict):
            yield from value.items()
        elif name != "text":
            yield name, value


def _shade(label: Any) -> str:
    return {1.0: "high", 0.0: "low"}.get(label, "") if isinstance(label, int | float) else ""


def _images(row: Mapping[str, Any]) -> int:
    messages = [each for value in row.values() if _is_conversation(value) for each in value]
    return sum(len(each["images"]) for each in messages if isinstance(each.get("images"), list))
