"""The steps of a completion, for rewards of single steps: pieces of its text, and the tokens that end them.

The pieces between separators that are not blank are steps, so that empty lines earn nothing; a completion without any
is one step. A separator belongs to the step that it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rlhf_core.data.chat import Tokenizer, decode_completion
from rlhf_core.errors import StageError
from rlhf_core.types import Trajectory

_INCOMPLETE = "\ufffd"  # what a character decodes to whose last bytes are missing


def step_texts(completion: str, separator: str) -> list[str]:
    """The steps of a completion, separators left out; at least one."""
    return [piece for piece in completion.split(separator) if piece.strip()] or [completion]


def step_ends(tokenizer: Tokenizer, token_ids: Sequence[int], separator: str) -> list[int]:
    """Index in `token_ids` of the last token of each step of the completion that they are, as `step_texts` has them.

    A step's last token is the one with which the separator after it is complete; the last step's is the last token,
    such as the end of the text. Two steps that one token ends have the same index.
    The sampled tokens are decoded, up to the token in question; nothing is ever tokenised.
    """
    text = decode_completion(tokenizer, token_ids)

    def readable(index: int) -> int:
        """Characters of `text` that are known with the token `index`: a character may need several tokens."""
        known = decode_completion(tokenizer, token_ids[: index + 1]).rstrip(_INCOMPLETE)
        if not text.startswith(known):
            raise StageError(
                f"this tokenizer changes text that it has decoded ({known!r}), so steps have no last tokens"
            )
        return len(known)

    position = 0
    complete: list[int] = []  # characters up to the end of each step, its separator included
    for piece in text.split(separator):
        position += len(piece) + len(separator)
        if piece.strip():
            complete.append(position)
    ends: list[int] = []
    for position in complete[:-1]:
        first = ends[-1] if ends else 0
        ends.append(first + bisect_left(range(first, len(token_ids)), position, key=readable))
    return [*ends, len(token_ids) - 1]


def step_tokens(tokenizer: Tokenizer, trajectory: Trajectory, separator: str) -> list[int]:
    """Index in the trajectory of the last token of each step of what the policy sampled."""
    sampled = trajectory.loss_mask.nonzero().squeeze(-1)
    ends = step_ends(tokenizer, trajectory.token_ids[sampled].tolist(), separator)
    return [int(index) for index in sampled[ends]]
