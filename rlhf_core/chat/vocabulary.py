"""Checks of a tokenizer against its model: every token needs a row of the embedding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.chat.rendering import Tokenizer

# A text model's tokenizer may have the tokens of its siblings that see and hear, which no text contains.
_OF_OTHER_SENSES = re.compile(r"image|audio|video|vision|speech", re.IGNORECASE)


def shared_numbers(folder: Path) -> Iterator[str]:
    """Yield a problem if two tokens of the folder's tokenizer.json have one id, which makes the tokenisation arbitrary.

    Added tokens may rename reserved ones, so only the tokens of the vocabulary itself are compared.
    """
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content.get("model", {}).get("vocab")
    token_of: dict[int, str] = {}
    for token, index in vocabulary.items() if isinstance(vocabulary, dict) else ():
        other = token_of.setdefault(index, token)
        if other != token:
            yield (
                f"the tokenizer's tokens {other!r} and {token!r} both have the number {index}: tokenizer.json is "
                "damaged, fetch it again"
            )
            return


def form_problems(folder: Path) -> Iterator[str]:
    """Yield a problem for each part of the folder's tokenizer.json, a JSON object, that is missing or malformed."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = content.get("model"), content.get("added_tokens")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        yield "tokenizer.json has no `model` with a `vocab`: fetch it again"
    if not isinstance(added, list):
        what = "has no list `added_tokens`" if added is None else "has `added_tokens` that are not a list"
        yield f"tokenizer.json {what}: fetch it again, or save it with transformers' save_pretrained"
        return
    for index, token in enumerate(added):
        if not isinstance(token, dict) or type(token.get("id")) is not int or not isinstance(token.get("content"), str):
            yield f"tokenizer.json: `added_tokens[{index}]` is not an object of a whole number `id` and text `content`"
            return


def tokens_beyond(tokenizer: Tokenizer, rows: int) -> Iterator[str]:
    """Yield a problem if the tokenizer has tokens without one of the embedding's `rows`."""
    beyond = sorted(
        (index, token)
        for token, index in tokenizer.get_vocab().items()
        if index >= rows and not _OF_OTHER_SENSES.search(token)
    )
    if beyond:
        index, token = beyond[0]
        others = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        role = next(
            (f", its {name}," for name, special in tokenizer.special_tokens_map.items() if special == token), ""
        )
        yield (
            f"the tokenizer's token {token!r}{role} has the number {index}{others}, but the model has {rows} rows "
            "(vocab_size): give the tokenizer of this model, or add rows with transformers' resize_token_embeddings"
        )
