"""Lengths before anything runs: does every prompt fit, with its completion, into what the model and engines allow?"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf_core.config.base_model import FolderModel, ScratchModel
from rlhf_core.config.data import DataFormat
from rlhf_core.config.recipe import Recipe
from rlhf_core.config.rollout import SamplingConfig
from rlhf_core.data.chat import Tokenizer, encode_completion, encode_conversation, encode_prompt, load_tokenizer
from rlhf_core.data.formats import Row
from rlhf_core.data.tokenizers import word_level_tokenizer
from rlhf_core.errors import StageError
from rlhf_core.pipeline.preflight_data import Located, Use

_TOKENISED_ROWS = 1000  # of each dataset, those with the most characters


def check_context(recipe: Recipe, context: int | None) -> Iterator[str]:
    """Settings of length against each other and against the model's context; None: not known yet."""
    for section in ("pretrain", "sft", "reward_model"):
        settings = getattr(recipe, section)
        if settings is not None and context is not None and settings.max_length > context:
            yield f"{section}.max_length={settings.max_length} is more than the model's context of {context} tokens"
    for section in ("rl", "evaluation"):
        settings = getattr(recipe, section)
        if settings is None:
            continue
        longest = settings.rollout.max_length
        if context is not None and longest > context:
            yield f"{section}.rollout.max_length={longest} is more than the model's context of {context} tokens"
        if settings.sampling.max_tokens >= longest:
            yield (
                f"{section}.sampling.max_tokens={settings.sampling.max_tokens} leaves no room for a prompt "
                f"in {section}.rollout.max_length={longest}"
            )


def check_lengths(recipe: Recipe, uses: list[Use], samples: dict[str, list[Located]], root: Path) -> list[str]:
    """Rows that are too long for the stage that reads them, as far as the tokenizer is at hand without a download."""
    uses = [use for use in uses if samples.get(use.dataset) and use.format != "text"]  # long text is cut, not refused
    uses = [use for use in uses if recipe.data[use.dataset].format == use.format]
    if not uses:
        return []
    tokenizer = _tokenizer(recipe, root)
    if tokenizer is None:
        return []
    problems: list[str] = []
    for use in uses:
        try:
            problems += _check_use(recipe, use, samples[use.dataset], tokenizer)
        except StageError as error:
            problems.append(f"{use.section}.dataset: `{use.dataset}`: {error}")
    return problems


def long_row_notes(recipe: Recipe, uses: list[Use], samples: dict[str, list[Located]], root: Path) -> list[str]:
    """One sentence for each use of a dataset whose rows are too long and dropped or truncated, as far as is known."""
    uses = [use for use in uses if samples.get(use.dataset) and use.format != "text"]
    uses = [use for use in uses if recipe.data[use.dataset].on_long_row != "error"]
    tokenizer = _tokenizer(recipe, root) if uses else None
    if tokenizer is None:
        return []
    notes = []
    for use in uses:
        policy, rows = recipe.data[use.dataset].on_long_row, samples[use.dataset]
        limit, measure = _limit(recipe, use), _MEASURES[use.format]
        candidates = heapq.nlargest(_TOKENISED_ROWS, rows, key=lambda located: _characters(located[1]))
        too_long = sum(measure(tokenizer, row) > limit for _, row in candidates)
        if too_long:
            notes.append(
                f"{use.section}.dataset: {'at least ' if len(rows) > len(candidates) else ''}{too_long} of {len(rows)} "
                f"rows of `data.{use.dataset}` that can be read here are longer than {limit} tokens: "
                f"{'dropped' if policy == 'drop' else 'truncated, or dropped where nothing to train would be left'}"
            )
    return notes


def _limit(recipe: Recipe, use: Use) -> int:
    """Tokens that a row of the dataset may have there."""
    settings = getattr(recipe, use.section.partition(".")[0])
    if use.format != "prompts":
        return int(settings.max_length)
    return int(settings.rollout.max_length - _sampling(recipe, use)[1].max_tokens)


def _tokenizer(recipe: Recipe, root: Path) -> Tokenizer | None:
    match recipe.base.source:
        case ScratchModel(words=words, context_length=length):
            return word_level_tokenizer(words, length)
        case FolderModel(path=path) if "://" not in path:
            return load_tokenizer(root / path)
        case _:
            return None


def _check_use(recipe: Recipe, use: Use, rows: list[Located], tokenizer: Tokenizer) -> Iterator[str]:
    if use.format == "prompts":
        yield from _check_prompts(recipe, use, rows, tokenizer)
        return
    settings = getattr(recipe, use.section)
    where, tokens = _longest(rows, tokenizer, _MEASURES[use.format])
    if tokens > settings.max_length and recipe.data[use.dataset].on_long_row == "error":
        yield (
            f"{use.section}.dataset: {where} in `data.{use.dataset}` has {tokens} tokens, more than "
            f"{use.section}.max_length={settings.max_length}: raise it, or set "
            f"data.{use.dataset}.on_long_row to drop or truncate"
        )


def _check_prompts(recipe: Recipe, use: Use, rows: list[Located], tokenizer: Tokenizer) -> Iterator[str]:
    section = use.section.partition(".")[0]
    settings = getattr(recipe, section)
    sampled_by, sampling = _sampling(recipe, use)
    where, tokens = _longest(rows, tokenizer, _prompt_tokens)
    room = settings.rollout.max_length - sampling.max_tokens
    if tokens > room > 0 and recipe.data[use.dataset].on_long_row == "error":
        yield (
            f"{use.section}.dataset: the prompt of {where} in `data.{use.dataset}` has {tokens} tokens; with "
            f"{sampled_by}.max_tokens={sampling.max_tokens} that is more than "
            f"{section}.rollout.max_length={settings.rollout.max_length}: raise it to "
            f"{tokens + sampling.max_tokens}, or set data.{use.dataset}.on_long_row to drop"
        )


def _sampling(recipe: Recipe, use: Use) -> tuple[str, SamplingConfig]:
    """How the prompts are answered, and where the recipe says so."""
    if recipe.rl is not None and recipe.rl.validation is not None and use.section == "rl.validation":
        own = recipe.rl.validation.sampling
        return ("rl.sampling", recipe.rl.sampling) if own is None else ("rl.validation.sampling", own)
    return f"{use.section}.sampling", getattr(recipe, use.section).sampling


def _longest(rows: list[Located], tokenizer: Tokenizer, measure: Callable[[Tokenizer, Row], int]) -> tuple[str, int]:
    """The place and the number of tokens of the longest row."""
    candidates = heapq.nlargest(_TOKENISED_ROWS, rows, key=lambda located: _characters(located[1]))
    return max(((where, measure(tokenizer, row)) for where, row in candidates), key=lambda found: found[1])


def _characters(row: Row) -> int:
    messages = row["messages"] if "messages" in row else row["prompt"]
    completion = max(len(row.get("chosen", "")), len(row.get("rejected", "")))
    return sum(len(message["content"]) for message in messages) + completion


def _prompt_tokens(tokenizer: Tokenizer, row: Row) -> int:
    return len(encode_prompt(tokenizer, row["prompt"]))


def _conversation_tokens(tokenizer: Tokenizer, row: Row) -> int:
    return len(encode_conversation(tokenizer, row["messages"])[0])


def _preference_tokens(tokenizer: Tokenizer, row: Row) -> int:
    return max(len(encode_completion(tokenizer, row["prompt"], row[side])[0]) for side in ("chosen", "rejected"))


_MEASURES: dict[DataFormat, Callable[[Tokenizer, Row], int]] = {
    "prompts": _prompt_tokens,
    "conversations": _conversation_tokens,
    "preferences": _preference_tokens,
}
