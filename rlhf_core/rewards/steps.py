"""The steps of a completion, for process rewards: the pieces of its text, and the last token of each.

The steps are the pieces between separators that are not blank, so that empty lines earn no reward. A completion without
any is one step. A separator belongs to the step before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rlhf_core.data.chat import Tokenizer, decode_completion
from rlhf_core.errors import StageError
from rlhf_core.types import Trajectory

_INCOMPLETE = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


def step_texts(completion: str, separator: str) -> list[str]:
    """The steps of a completion without their separators; at least one."""
    return [piece for piece in completion.split(separator) if piece.strip()] or [completion]


def step_ends(tokenizer: Tokenizer, token_ids: Sequence[int], separator: str) -> list[int]:
    """The index in `token_ids`, a completion, of the last token of each step of `step_texts`.

    The last token of a step is the one that completes the separator after it; that of the last step is the last token
    of the completion, such as the end of the text. Two steps that end in one token have the same index.
    Prefixes of the sampled tokens are decoded; nothing is re-tokenised.
    """
    text = decode_completion(tokenizer, token_ids)

    def num_decoded(index: int) -> int:
        """Characters of `text` that are complete after the token `index`: a character may need several tokens."""
        prefix = decode_completion(tokenizer, token_ids[: index + 1]).rstrip(_INCOMPLETE)
        if not text.startswith(prefix):
            raise StageError(
                f"this tokenizer changes text that it has already decoded ({prefix!r}), so steps have no last tokens"
            )
        return len(prefix)

    position = 0
    complete: list[int] = []  # characters up to the end of each step, including its separator
    for piece in text.split(separator):
        position += len(piece) + len(separator)
        if piece.strip():
            complete.append(position)
    ends: list[int] = []
    for position in complete[:-1]:
        first = ends[-1] if ends else 0
        ends.append(first + bisect_left(range(first, len(token_ids)), position, key=num_decoded))
    return [*ends, len(token_ids) - 1]


def step_tokens(tokenizer: Tokenizer, trajectory: Trajectory, separator: str) -> list[int]:
    """The index in the trajectory of the last token of each step that the policy sampled."""
    sampled = trajectory.loss_mask.nonzero().squeeze(-1)
    ends = step_ends(tokenizer, trajectory.token_ids[sampled].tolist(), separator)
    return [int(index) for index in sampled[ends]]
