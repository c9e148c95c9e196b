"""Does a tokenizer fit its model? Every token needs a row of the embedding."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhf_core.data.rendering import Tokenizer

# A text model's tokenizer may have the tokens of its siblings that see and hear, which no text contains.
_OF_OTHER_SENSES = re.compile(r"image|audio|video|vision|speech", re.IGNORECASE)


def tokens_beyond(tokenizer: Tokenizer, rows: int) -> Iterator[str]:
    """A sentence if the tokenizer has tokens without one of the embedding's `rows`."""
    beyond = sorted(
        (index, token)
        for token, index in tokenizer.get_vocab().items()
        if index >= rows and not _OF_OTHER_SENSES.search(token)
    )
    if beyond:
        index, token = beyond[0]
        others = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        role = next((f", its {name}," for name, own in tokenizer.special_tokens_map.items() if own == token), "")
        yield (
            f"the tokenizer's token {token!r}{role} has the number {index}{others}, but the model has {rows} rows "
            "(vocab_size): give the tokenizer of this model, or add rows with transformers' resize_token_embeddings"
        )
