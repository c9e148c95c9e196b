"""Preflight notes on probably unintended results of a tokenizer or a chat template."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.chat.rendering import Tokenizer, is_written_whole
from rlhf_core.chat.special_tokens import special_tokens_in, unknown_in
from rlhf_core.data.formats import Format
from rlhf_core.data.sources.base import Located
from rlhf_core.preflight.data import Use

_READ_ROWS = 200  # of each dataset are tokenised and written here


def reading_notes(use: Use, tokenizer: Tokenizer, rows: list[Located], data_format: Format) -> Iterator[str]:
    """Yield the notes on a dataset. rows: its readable ones."""
    yield from _special(use, tokenizer, rows, data_format)
    yield from _unknown(use, tokenizer, rows[:_READ_ROWS], data_format)
    yield from _changed(use, tokenizer, rows[:_READ_ROWS])


def _special(use: Use, tokenizer: Tokenizer, rows: list[Located], data_format: Format) -> Iterator[str]:
    """Yield a note if rows contain special tokens: a chat template may have been applied already."""
    with_tokens = [
        (where, tokens) for where, row in rows if (tokens := special_tokens_in(tokenizer, data_format.whole_text(row)))
    ]
    if with_tokens:
        where, tokens = with_tokens[0]
        yield (
            f"{use.setting}: {len(with_tokens)} of {len(rows)} rows of `data.{use.dataset}` hold special tokens of the "
            f"tokenizer, such as `{tokens[0]}` in {where}, which are read as text: only the chat template writes them"
        )


def _unknown(use: Use, tokenizer: Tokenizer, rows: list[Located], data_format: Format) -> Iterator[str]:
    with_unknown = [
        (where, unknown) for where, row in rows if (unknown := unknown_in(tokenizer, data_format.whole_text(row)))
    ]
    if with_unknown:
        where, unknown = with_unknown[0]
        yield (
            f"{use.setting}: {len(with_unknown)} of {len(rows)} rows of `data.{use.dataset}` hold what the tokenizer "
            f"does not know, such as `{unknown[:40]}` in {where}, and reads as {tokenizer.unk_token}: the model can "
            "neither see nor write it"
        )


def _changed(use: Use, tokenizer: Tokenizer, rows: list[Located]) -> Iterator[str]:
    changed = [where for where, row in rows if "messages" in row and not is_written_whole(tokenizer, row)]
    if changed:
        yield (
            f"{use.setting}: the chat template leaves out or changes a part of the last reply in {len(changed)} of "
            f"{len(rows)} rows of `data.{use.dataset}`, such as {changed[0]}: that part is not trained as it stands"
        )
