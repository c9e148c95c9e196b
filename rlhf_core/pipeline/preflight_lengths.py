"""Lengths before anything runs: does every prompt fit, with its completion, into what the model and engines allow?"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rlhf_core.config.base_model import FolderModel, ScratchModel
from rlhf_core.config.stage import RowLimit
from rlhf_core.data.chat import Tokenizer, encode_completion, encode_conversation, encode_prompt, load_tokenizer
from rlhf_core.data.formats import Row
from rlhf_core.data.templates import with_template
from rlhf_core.data.tokenizers import word_level_tokenizer
from rlhf_core.errors import StageError
from rlhf_core.pipeline.outline import Draft
from rlhf_core.pipeline.preflight_data import Located, Use
from rlhf_core.pipeline.preflight_model import BaseModel
from rlhf_core.pipeline.recipe import Recipe

_TOKENISED_ROWS = 1000  # of each dataset, those with the most characters


def check_context(nodes: Mapping[str, Draft], models: Mapping[str, BaseModel]) -> Iterator[str]:
    """Settings of length against each other and against the context of the model that a stage starts from.

    models: by node, of those whose model is at hand.
    """
    for node in nodes.values():
        context = models[node.name].context if node.name in models else None
        for setting, tokens in node.config.sequence_lengths().items():
            if context is not None and tokens > context:
                yield f"{node.section}.{setting}={tokens} is more than the model's context of {context} tokens"
        for reference in node.references:
            limit = node.config.row_limit(reference.path) if reference.reads.role == "dataset" else None
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
) -> list[str]:
    """Rows that are too long for the stage that reads them, as far as the tokenizer is at hand without a download."""
    tokenizers: dict[BaseModel, Tokenizer] = {}
    problems: list[str] = []
    for use in uses:
        limit = use.node.config.row_limit(use.reference.path)
        model = models.get(use.node.name)
        if limit is None or model is None or not samples.get(use.dataset):
            continue
        if recipe.data[use.dataset].format != use.format:
            continue
        try:
            if model not in tokenizers:
                tokenizers[model] = _tokenizer(model, root)
            too_long = list(_check_rows(use, limit, samples[use.dataset], tokenizers[model]))
            problems += too_long if recipe.data[use.dataset].on_long_row == "error" else []
        except StageError as error:
            problems.append(f"{use.setting}: `{use.dataset}`: {error}")
    return problems


def long_row_notes(
    recipe: Recipe,
    uses: list[Use],
    samples: dict[str, list[Located]],
    models: Mapping[str, BaseModel],
    root: Path,
) -> list[str]:
    """One sentence for each use of a dataset whose rows are too long and dropped or truncated, as far as is known."""
    notes = []
    for use in uses:
        limit, model = use.node.config.row_limit(use.reference.path), models.get(use.node.name)
        policy = recipe.data[use.dataset].on_long_row
        if limit is None or model is None or use.format not in _MEASURES or policy == "error":
            continue
        tokenizer, measure, rows = _tokenizer(model, root), _MEASURES[use.format], samples.get(use.dataset, [])
        candidates = heapq.nlargest(_TOKENISED_ROWS, rows, key=lambda located: _characters(located[1]))
        room = limit.tokens - limit.completion_tokens
        too_long = sum(measure(tokenizer, row) > room for _, row in candidates)
        if too_long:
            notes.append(
                f"{use.setting}: {'at least ' if len(rows) > len(candidates) else ''}{too_long} of {len(rows)} "
                f"rows of `data.{use.dataset}` that can be read here are longer than {room} tokens: "
                f"{'dropped' if policy == 'drop' else 'truncated, or dropped where nothing to train would be left'}"
            )
    return notes


def _tokenizer(model: BaseModel, root: Path) -> Tokenizer:
    match model.config.source:
        case ScratchModel(words=words, context_length=length):
            own = word_level_tokenizer(words, length)
        case FolderModel(path=path):
            own = load_tokenizer(root / path)
    return with_template(own, model.config, root.joinpath)


def _check_rows(use: Use, limit: RowLimit, rows: list[Located], tokenizer: Tokenizer) -> Iterator[str]:
    section = use.node.section
    if use.format != "prompts":
        where, tokens = _longest(rows, tokenizer, _MEASURES[use.format])
        if tokens > limit.tokens:
            yield (
                f"{use.setting}: {where} in `data.{use.dataset}` has {tokens} tokens, more than "
                f"{section}.{limit.setting}={limit.tokens}: raise it, or set "
                f"data.{use.dataset}.on_long_row to drop or truncate"
            )
        return
    where, tokens = _longest(rows, tokenizer, _prompt_tokens)
    room = limit.tokens - limit.completion_tokens
    if tokens > room > 0:
        yield (
            f"{use.setting}: the prompt of {where} in `data.{use.dataset}` has {tokens} tokens; with "
            f"{section}.{limit.completion_setting}={limit.completion_tokens} that is more than "
            f"{section}.{limit.setting}={limit.tokens}: raise it to "
            f"{tokens + limit.completion_tokens}, or set data.{use.dataset}.on_long_row to drop"
        )


def _longest(rows: list[Located], tokenizer: Tokenizer, measure: Callable[[Tokenizer, Row], int]) -> tuple[str, int]:
    """The place and the number of tokens of the longest row."""
    candidates = heapq.nlargest(_TOKENISED_ROWS, rows, key=lambda located: _characters(located[1]))
    return max(((where, measure(tokenizer, row)) for where, row in candidates), key=lambda found: found[1])


def _characters(row: Row) -> int:
    messages = row["messages"] if "messages" in row else row["prompt"]
    completion = max(len(row.get("chosen", "")), len(row.get("rejected", "")))
    return sum(len(message["content"]) for message in messages) + completion


def _prompt_tokens(tokenizer: Tokenizer, row: Row) -> int:
    return len(encode_prompt(tokenizer, row["prompt"], row.get("tools")))


def _conversation_tokens(tokenizer: Tokenizer, row: Row) -> int:
    return max(len(ids) for ids, _ in encode_conversation(tokenizer, row["messages"], row.get("tools")))


def _preference_tokens(tokenizer: Tokenizer, row: Row) -> int:
    sides = ("chosen", "rejected")
    return max(len(encode_completion(tokenizer, row["prompt"], row[side], row.get("tools"))[0]) for side in sides)


_MEASURES: dict[str | None, Callable[[Tokenizer, Row], int]] = {
    "prompts": _prompt_tokens,
    "conversations": _conversation_tokens,
    "preferences": _preference_tokens,
}
