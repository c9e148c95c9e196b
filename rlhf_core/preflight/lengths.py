"""Preflight checks of lengths: whether prompts and completions fit the limits of model and engines."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.chat.encoding import Tokenizer, load_tokenizer
from rlhf_core.chat.templates import with_template
from rlhf_core.config.data.dataset import DatasetConfig, LongRowPolicy
from rlhf_core.config.data.format_table import FORMATS
from rlhf_core.config.stages.base import RowLimit
from rlhf_core.config.stages.base_model import FolderModel, ScratchModel
from rlhf_core.data.formats import Format, Row, format_of
from rlhf_core.data.formats.preferences import by_prompt
from rlhf_core.data.sources.base import Located
from rlhf_core.errors import ConversationError, StageError
from rlhf_core.graph.drafting import Draft
from rlhf_core.preflight.data import Use
from rlhf_core.preflight.model import BaseModel, scratch_tokenizer
from rlhf_core.preflight.reading import reading_notes
from rlhf_core.recipe.recipe import Recipe

_TOKENISED_ROWS = 1000  # of each dataset, those with the most characters


def check_context(nodes: Mapping[str, Draft], models: Mapping[str, BaseModel]) -> Iterator[str]:
    """Check settings of length against each other and against the context of the stage's initial model.

    models: available models, by node.
    """
    for node in nodes.values():
        context = models[node.name].context if node.name in models else None
        for setting, tokens in node.config.sequence_lengths().items():
            if context is not None and tokens > context:
                place = f"{node.section}.{setting}={tokens}"
                yield f"{place} is more than the model's context of {context} tokens: lower it"
        for input_setting in node.input_settings:
            limit = node.config.row_limit(input_setting.path) if input_setting.reads.role == "dataset" else None
            if limit is not None and limit.completion_tokens >= limit.tokens:
                yield (
                    f"{node.section}.{limit.completion_setting}={limit.completion_tokens} leaves no room for a prompt "
                    f"in {node.section}.{limit.setting}={limit.tokens}"
                )


def check_lengths(
    recipe: Recipe,
    uses: list[Use],
    samples: dict[str, list[Located]],
    models: Mapping[str, BaseModel],
    root: Path,
) -> tuple[list[str], list[str]]:
    """Return problems and notes of rows that are too long for the stage that reads them: an error, or dropped or
    truncated, as set by their dataset. Checks only models whose tokenizer needs no download.
    """
    tokenizers: dict[BaseModel, Tokenizer] = {}
    problems: list[str] = []
    notes: list[str] = []
    for use in uses:
        limit = use.node.config.row_limit(use.read_by.path)
        model = models.get(use.node.name)
        if limit is None or model is None or not samples.get(use.dataset):
            continue
        config, rows = recipe.data[use.dataset], samples[use.dataset]
        if limit.splits and config.on_long_row == "error":
            continue
        try:
            if model not in tokenizers:
                tokenizers[model] = tokenizer_of(model, root)
            lengths, unwritable = _lengths(use, rows, tokenizers[model], format_of(config.format), limit.room)
            measured = _Measured(use, config, limit, rows, tokenizers[model], lengths, unwritable)
            too_few = measured.too_few()
        except StageError as error:
            problems.append(f"{use.setting}: `{use.dataset}`: {error}")
            continue
        notes += reading_notes(use, tokenizers[model], rows, format_of(config.format))
        first = next(iter(unwritable.values()), "")
        if unwritable and config.on_bad_row == "error":
            problems.append(
                f"{use.setting}: {first}; or set data.{use.dataset}.on_bad_row to drop, which drops at least "
                f"{len(unwritable)} of {len(rows)} rows of `data.{use.dataset}`"
            )
        elif too_few is not None:
            problems.append(too_few)
            continue
        elif unwritable:
            notes.append(
                f"{use.setting}: at least {len(unwritable)} of {len(rows)} rows of `data.{use.dataset}` are dropped, "
                f"which the chat template cannot write; first: {first}"
            )
        if not lengths:
            continue
        if config.on_long_row == "error":
            problems += _too_long(use, limit, lengths, not FORMATS[config.format].truncation_problem)
        else:
            notes += _lost(use, limit, lengths, len(rows), config.on_long_row)
    return problems, notes


def tokenizer_of(model: BaseModel, root: Path) -> Tokenizer:
    """Return the tokenizer of an available base model."""
    match model.config.source:
        case ScratchModel() as source:
            tokenizer = scratch_tokenizer(source)
        case FolderModel(path=path):
            tokenizer = load_tokenizer(root / path)
    return with_template(tokenizer, model.config, root.joinpath)


@dataclass(frozen=True, slots=True)
class _Length:
    index: int  # of the row
    where: str
    tokens: int
    exact: bool = True  # else it has at least so many

    def __str__(self) -> str:
        return f"{self.tokens} tokens" if self.exact else f"at least {self.tokens} tokens"


def _too_long(use: Use, limit: RowLimit, lengths: list[_Length], truncatable: bool) -> Iterator[str]:
    section = use.node.section
    longest = max(lengths, key=lambda length: length.tokens)
    if not limit.completion_setting:
        if longest.tokens > limit.tokens:
            yield (
                f"{use.setting}: {longest.where} in `data.{use.dataset}` has {longest}, more than "
                f"{section}.{limit.setting}={limit.tokens}: raise it, or set "
                f"data.{use.dataset}.on_long_row to drop{' or truncate' if truncatable else ''}"
            )
    elif longest.tokens > limit.room > 0:
        yield (
            f"{use.setting}: the prompt of {longest.where} in `data.{use.dataset}` has {longest}; with "
            f"{section}.{limit.completion_setting}={limit.completion_tokens} that is more than "
            f"{section}.{limit.setting}={limit.tokens}: raise it to "
            f"{longest.tokens + limit.completion_tokens}, or set data.{use.dataset}.on_long_row to drop"
        )


def _row(located: Located) -> Row:
    return located[1]


@dataclass(frozen=True, slots=True)
class _Measured:
    """The rows of a dataset as read by one stage."""

    use: Use
    config: DatasetConfig
    limit: RowLimit
    rows: list[Located]
    tokenizer: Tokenizer
    lengths: list[_Length]
    unwritable: Mapping[int, str]  # by index a sentence for each row that the chat template cannot write

    @property
    def too_long(self) -> set[int]:
        """Return the indices of rows beyond the stage's limit."""
        return {length.index for length in self.lengths if length.tokens > self.limit.room}

    def too_few(self) -> str | None:
        """Return the problem of a dataset with too few remaining rows; None if enough remain."""
        policy, too_long = self.config.on_long_row, self.too_long
        dropped = too_long if policy != "error" else set()
        kept = [index for index in range(len(self.rows)) if index not in dropped and index not in self.unwritable]
        if policy == "truncate" and not self._are_enough(kept):  # the remainder of a row takes time to compute
            form, room = format_of(self.config.format), self.limit.room
            kept += [i for i in dropped if form.least_tokens(self.tokenizer, self.rows[i][1]) <= room]
        if self.limit.room <= 0 or self._are_enough(kept):
            return None
        name, (first, *_) = self.use.dataset, [*self.unwritable.values(), ""]
        what = "fewer than two prompts" if kept else "no row"
        return (
            f"{self.use.setting}: {what} of `data.{name}` would be left: of {len(self.rows)} rows {len(dropped)} are "
            f"longer than {self.limit.room} tokens, and {len(self.unwritable)} cannot be written by the chat template"
            + (f"; the first that the chat template cannot write: {first}" if first else "")
        )

    def _are_enough(self, kept: list[int]) -> bool:
        if not self.use.node.config.splits_by_prompt(self.use.read_by.path) or len(self.rows) > _TOKENISED_ROWS:
            return bool(kept)
        # A dataset with the rows of one prompt is what `check_effects` finds.
        return len(by_prompt(self.rows[index][1] for index in kept)) >= min(2, len(by_prompt(map(_row, self.rows))))


def _lost(use: Use, limit: RowLimit, lengths: list[_Length], rows: int, policy: LongRowPolicy) -> Iterator[str]:
    too_long = sum(length.tokens > limit.room for length in lengths)
    if too_long:
        yield (
            f"{use.setting}: {'at least ' if rows > len(lengths) else ''}{too_long} of {rows} "
            f"rows of `data.{use.dataset}` that can be read here are longer than {limit.room} tokens: "
            f"{'dropped' if policy == 'drop' else 'truncated, or dropped where nothing to train would be left'}"
        )


def _lengths(
    use: Use, rows: list[Located], tokenizer: Tokenizer, data_format: Format, room: int
) -> tuple[list[_Length], dict[int, str]]:
    """Return the lengths of the rows with the most characters, and the problems of those that the stage cannot read, by
    index in the order of the rows.

    room: tokens; a row that exceeds it by its characters alone is not tokenised: it may be a whole book.
    """
    sizes = [len(data_format.whole_text(row)) for _, row in rows]
    longest = sorted(heapq.nlargest(_TOKENISED_ROWS, range(len(rows)), key=sizes.__getitem__))
    characters = max(map(len, tokenizer.get_vocab()), default=1)  # of a token, at most
    lengths, unwritable = [], {}
    for index in longest:
        where, row = rows[index]
        least = sizes[index] // characters
        if least > room:
            lengths.append(_Length(index, where, least, exact=False))
            continue
        try:
            lengths.append(_Length(index, where, data_format.num_tokens(tokenizer, use.node.config.as_read(row))))
        except ConversationError as error:
            unwritable[index] = f"{where}: {error}"
    return lengths, unwritable
