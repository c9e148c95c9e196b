"""Log-probs of the tokens of replies, in the form of chat completions and responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.chat.encoding import Tokenizer

if TYPE_CHECKING:
    from rlhf_core.rollout.engine import Unfinished
    from rlhf_core.types import Completion


def token_scores(tokenizer: Tokenizer, tokens: Completion | Unfinished, first: int = 0) -> list[dict[str, Any]]:
    """Return {token, logprob, bytes, top_logprobs} of each token, from `first` on."""
    scores = []
    for place in range(first, len(tokens.token_ids)):
        top = tokens.top_logprobs[place] if tokens.top_logprobs else {}
        scores.append(
            {
                **_score(tokenizer, tokens.token_ids[place], tokens.logprobs[place]),
                "top_logprobs": [_score(tokenizer, token, logprob) for token, logprob in top.items()],
            }
        )
    return scores


def _score(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = str(tokenizer.decode([token]))
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
