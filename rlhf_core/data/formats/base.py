"""What a format answers about its rows, and what all formats are made of: columns, ids, errors."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.data.rendering import Tokenizer
from rlhf_core.errors import RecipeError, did_you_mean

Row = dict[str, Any]
_ID_LENGTH = 16  # hex digits: 64 bits


class RowError(ValueError):
    """A row does not fit its format; the text says how, the caller adds where.

    reason: the same without the values of this row, so that rows with the same fault can be counted together.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message

    def at(self, where: str) -> RowError:
        """The same error with its place in front."""
        return RowError(f"{where}: {self}", self.reason)


@dataclass(frozen=True, slots=True)
class Generated:
    """A task of reasoning-gym, from which a format may make a row."""

    task: str
    question: str
    answer: str | None  # None: there is no single right one
    metadata: Mapping[str, Any]

    def right_answer(self) -> str:
        """Raises RowError if there is no single one."""
        if self.answer is None:
            raise RowError(
                f"reasoning_gym task `{self.task}` has no single right answer: it can be used in prompts only"
            )
        return self.answer


class Format(ABC):
    """Everything that is asked about the rows of a format. `row` is a canonical row, but for `canonical`.

    Texts are compared with their whitespace normalised, which is done where they are compared.
    """

    name: str  # as in config/format_table.py

    @abstractmethod
    def canonical(self, row: Row) -> Row:
        """The canonical row without its `id`, from a source's row, its columns named as the format names them.

        Raises RowError that names the column.
        """

    @abstractmethod
    def asked_text(self, row: Mapping[str, Any]) -> str:
        """What the row asks: rows of other datasets must not ask it where models are tested on this one."""

    @abstractmethod
    def whole_text(self, row: Mapping[str, Any]) -> str:
        """Everything that it says, by which near-duplicates are found, and long rows before they are tokenised."""

    @abstractmethod
    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        """Tokens of the longest sequence that is made of it. Raises ConversationError if it cannot be written."""

    def asked_texts(self, row: Mapping[str, Any]) -> Iterable[str]:
        """All texts under which what another row asks may stand in this one."""
        return (self.asked_text(row),)

    def running_text(self, row: Mapping[str, Any]) -> str:
        """Text in which what another row asks may stand anywhere; empty: only `asked_texts` are compared."""
        return ""

    def duplicate_key(self, row: Mapping[str, Any]) -> str:
        """Rows with the same key are duplicates: by default those with the same content."""
        return str(row["id"])

    def generated(self, item: Generated) -> Row:
        """A row of a source, made of a generated task. Raises RecipeError if the format has no such rows."""
        raise RecipeError(f"reasoning_gym has no {self.name}: use a function source to make them")


@dataclass(frozen=True, slots=True)
class Rows:
    """Canonical rows, and what they mean."""

    format: Format
    rows: Iterable[Mapping[str, Any]]


def row_id(row: Mapping[str, Any]) -> str:
    """Content hash of a canonical row without its `id`."""
    try:
        content = json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can escape and UTF-8 cannot hold
        reason = "a text is not valid Unicode"
        raise RowError(f"{reason} ({error.reason})", reason) from error
    except (TypeError, ValueError) as error:
        reason = "a value cannot be written as JSON"
        raise RowError(f"{reason} ({error})", reason) from error
    return hashlib.sha256(content).hexdigest()[:_ID_LENGTH]


def missing_column(name: str, known: Iterable[str]) -> RowError:
    names = sorted(known)
    reason = f"no column `{name}`"
    known_names = ", ".join(names) or "none"
    return RowError(f"{reason}{did_you_mean(name, names)}; it has {known_names} (see `columns` in the recipe)", reason)


def normalised(text: str) -> str:
    """`text` with every run of whitespace as one space, none at the ends: how texts are compared."""
    return " ".join(text.split())


def filled(row: Row, column: str) -> str:
    if column not in row:
        raise missing_column(column, row)
    text = plain(row[column], column)
    if not text.strip():
        raise RowError(f"`{column}` is empty")
    return text


def plain(value: Any, column: str) -> str:
    """Text, or a number as text: answers are often written as numbers in JSON."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"`{column}` must be text, this is {type(value).__name__}", f"`{column}` is not text")
    return str(value)


def number(value: Any, column: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RowError(f"`{column}` must be a number, this is {value!r}", f"`{column}` is not a number") from error
