"""Interface of formats, and their shared parts: columns, ids, errors."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlhf_core.chat.rendering import Tokenizer
from rlhf_core.config.numbers import LARGEST_REWARD
from rlhf_core.config.texts import is_blank, is_unicode
from rlhf_core.errors import RecipeError, did_you_mean, one_line, reason_of, shortened

Row = dict[str, Any]
_ID_LENGTH = 16  # hex digits: 64 bits
_MAX_DEPTH = 100
_SHOWN_COLUMNS = 20
_SHOWN_CHARACTERS = 1000


class RowError(ValueError):
    """A row does not fit its format; the text is the reason, the caller adds the place.

    reason: the same without the values of this row, so that rows with the same fault can be counted together.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(_shown(message))
        self.reason = _shown(reason or message)

    def at(self, where: str) -> RowError:
        """Return the same error with its place in front."""
        return RowError(f"{where}: {self}", self.reason)


@dataclass(frozen=True, slots=True)
class Generated:
    """A task of reasoning-gym, from which a format may make a row."""

    task: str
    question: str
    answer: str | None  # None: there is no single right one
    metadata: Mapping[str, Any]

    def right_answer(self) -> str:
        """The only answer. Raises RowError if there is no single one."""
        if self.answer is None:
            raise RowError(
                f"reasoning_gym task `{self.task}` has no single right answer: it can be used in prompts only"
            )
        return self.answer


class Format(ABC):
    """Interface of a format. `row` is a canonical row, except in `canonical`.

    Texts are returned as they are; callers normalise whitespace before comparing them.
    """

    name: str  # as in config/data/format_table.py
    reads: frozenset[str] | None = None  # the columns of a source that count; none: all
    named: frozenset[str] = frozenset()  # those that mean something to it, where it keeps all others too
    has_images = False  # whether its messages may have images
    completions_with_images: Sequence[str] = ()  # columns whose conversations may have some, beside those of prompts

    @abstractmethod
    def canonical(self, row: Row) -> Row:
        """Return the canonical row without its `id`, from a source's row with the format's column names.

        Raises RowError that names the column.
        """

    def unread(self, columns: frozenset[str]) -> frozenset[str]:
        """Return the columns of one row, in the format's names, that are not read."""
        return frozenset() if self.reads is None else columns - self.reads

    @abstractmethod
    def asked_text(self, row: Mapping[str, Any]) -> str:
        """Return the question of the row: training rows must not contain it if models are evaluated on this one."""

    @abstractmethod
    def whole_text(self, row: Mapping[str, Any]) -> str:
        """Return all text of the row, for finding near-duplicates, and long rows before they are tokenised."""

    @abstractmethod
    def num_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        """Return the tokens of the row's longest sequence. Raises ConversationError if it cannot be rendered."""

    def all_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        """Return the tokens of all sequences of the row, as a stage reads them."""
        return self.num_tokens(tokenizer, row)

    def least_tokens(self, tokenizer: Tokenizer, row: Mapping[str, Any]) -> int:
        """Return the tokens that a sequence must keep when truncated at its end, for something to be left to train
        on.
        """
        return self.num_tokens(tokenizer, row)

    def asked_texts(self, row: Mapping[str, Any]) -> Iterable[str]:
        """Return all texts of this row that may equal another row's question."""
        return (self.asked_text(row),)

    def running_text(self, row: Mapping[str, Any]) -> str:
        """Return text that may contain another row's question anywhere; empty: only `asked_texts` are compared."""
        return ""

    def duplicate_key(self, row: Mapping[str, Any]) -> str:
        """Return the key by which duplicates are recognised: by default the content."""
        return str(row["id"])

    def generated(self, item: Generated) -> Row:
        """Return a row made from a generated task. Raises RecipeError if the format has no such rows."""
        raise RecipeError(f"reasoning_gym has no {self.name}: use a function source to make them")


@dataclass(frozen=True, slots=True)
class Rows:
    """Canonical rows, and their format."""

    format: Format
    rows: Iterable[Mapping[str, Any]]


def first_trained(mask: Sequence[bool]) -> int:
    """Return the index of the first trained token; nothing predicts the very first."""
    return next((index for index, trained in enumerate(mask) if trained and index), len(mask))


def row_id(row: Mapping[str, Any]) -> str:
    """Return the content hash of a canonical row without its `id`. Raises RowError for one that JSON cannot encode."""
    return _digest(_as_json(row))


def input_row_id(row: Mapping[str, Any]) -> str:
    """Return `row_id` of a user's row. Raises RowError also for NUL characters and very deep values, which usually are
    damage; sampled text may contain them.
    """
    text = _as_json(row)
    if "\\u0000" in text or text.count("{") + text.count("[") > _MAX_DEPTH:
        require_sound(row)
    return _digest(text)


def _as_json(row: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()  # halves of surrogate pairs cannot be
    except (TypeError, ValueError, RecursionError) as error:
        require_sound(row)
        raise RowError(
            f"a value cannot be written as JSON ({reason_of(error)})", "a value cannot be written as JSON"
        ) from error
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_LENGTH]


def require_sound(value: Any, place: tuple[str, ...] = (), *, allow_nul: bool = False) -> None:
    """Raise RowError, which names the place, for values that `input_row_id` rejects.

    place: column, and the keys below it. allow_nul: it may contain sampled text.
    """
    column = place[0] if place else ""

    def problem(what: str) -> RowError:
        return RowError(f"`{'.'.join(place)}` {what}", f"`{column}` {what}")

    if len(place) > _MAX_DEPTH:
        raise RowError(f"`{column}` has more than {_MAX_DEPTH} lists and mappings inside each other")
    if isinstance(value, str):
        if "\0" in value and not allow_nul:
            raise problem("holds a NUL character")
        if not is_unicode(value):
            raise problem("is not valid Unicode: it holds half a surrogate pair")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise problem(f"has a key that is {type(key).__name__}, not text")
            require_sound(key, (*place, key), allow_nul=allow_nul)
            require_sound(item, (*place, key), allow_nul=allow_nul)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_sound(item, (*place, str(index)), allow_nul=allow_nul)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise problem("is NaN or infinite")
    elif not (value is None or isinstance(value, int)):
        raise problem(f"is {type(value).__name__}, which JSON cannot hold: write it as text or a number")


class MissingColumnError(RowError):
    """A row lacks `column`, or has null there."""

    def __init__(self, column: str, columns: Iterable[str], alternative: str = "") -> None:
        """alternative: another valid column, ` or …`."""
        names = sorted(columns)
        reason = f"no column `{column}`"
        listed = ", ".join(
            name if name and name == name.strip() else f"`{name}`" for name in names[:_SHOWN_COLUMNS]
        ) + (", …" if len(names) > _SHOWN_COLUMNS else "")
        near = did_you_mean(column, names)
        super().__init__(
            f"{reason}{alternative}{near}; it has {listed or 'none'} (see `columns` in the recipe)", reason
        )
        self.column = column


def normalised(text: str) -> str:
    """Return `text` with every run of whitespace as one space, none at the ends: the form in which texts are
    compared.
    """
    return " ".join(text.split())


def filled(row: Row, column: str) -> str:
    if column not in row:
        raise MissingColumnError(column, row)
    text = plain(row[column], column)
    if is_blank(text):
        raise RowError(f"`{column}` is empty")
    return text


def plain(value: Any, column: str) -> str:
    """Return text, or a finite number as text: answers are often written as numbers in JSON."""
    if isinstance(value, str):
        return str.__str__(value)  # of an Enum that is text, str() gives its name
    if isinstance(value, int) and not isinstance(value, bool):
        with suppress(ValueError):  # a number of thousands of digits
            return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    shown = value if isinstance(value, float) else type(value).__name__
    raise RowError(f"`{column}` must be text, this is {shown}", f"`{column}` is not text")


def number(value: Any, column: str) -> float:
    """Return a finite number, also from text, as in CSV."""
    try:
        parsed = math.nan if isinstance(value, bool) or _other_number(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        parsed = math.nan
    if not math.isfinite(parsed):
        shown = repr(value[:40]) if isinstance(value, str) else type(value).__name__
        shown = str(value) if isinstance(value, float) else shown  # NaN, or infinite
        raise RowError(f"`{column}` must be a number, this is {shown}", f"`{column}` is not a number")
    return parsed


def reward_number(value: Any, column: str) -> float:
    """Return a number within the range of rewards in settings."""
    reward = number(value, column)
    if abs(reward) > LARGEST_REWARD:
        raise RowError(
            f"`{column}` is {reward:g}, and no reward is larger than {LARGEST_REWARD:,.0f}: scale rewards down",
            f"`{column}` is too large",
        )
    return reward


def _other_number(value: Any) -> bool:
    """Return whether only Python reads the text as a number: 1_0, or digits of other scripts."""
    return isinstance(value, str) and ("_" in value or not value.isascii())


def _shown(text: str) -> str:
    """Return `text` in printable form, shortened: values of rows may contain line ends and thousands of characters."""
    return shortened(one_line(" ".join(text.split())), _SHOWN_CHARACTERS)
