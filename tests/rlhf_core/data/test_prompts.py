from __future__ import annotations

import pytest

from rlhf_core.data.fitting import RowPolicy
from rlhf_core.data.prompts import fit_prompts
from rlhf_core.data.tokenizers import word_level_tokenizer
from rlhf_core.errors import StageError

ROWS = [{"id": name, "prompt": [{"role": "user", "content": name * length}]} for name, length in (("a", 5), ("b", 6))]


def test_prompts_that_are_too_long_are_dropped_and_counted() -> None:
    """A prompt is <bos> <user> and its letters and <assistant>."""
    tokenizer = word_level_tokenizer((), 64)
    fitted = fit_prompts(ROWS, tokenizer, max_tokens=8, policy=RowPolicy(long="drop"))
    assert [prompt.id for prompt in fitted.rows] == ["a"]
    assert fitted.metrics() == {"rows_dropped_too_long": 1}
    everything = fit_prompts(ROWS, tokenizer, max_tokens=9, policy=RowPolicy(long="drop"))
    assert everything.metrics() == {"rows_dropped_too_long": 0}
    with pytest.raises(StageError, match=r"^prompt b \('bbbbbb'\) has 9 tokens, more than the 8"):
        fit_prompts(ROWS, tokenizer, max_tokens=8, policy=RowPolicy())
    with pytest.raises(StageError, match="a prompt that is cut asks another question"):
        fit_prompts(ROWS, tokenizer, max_tokens=8, policy=RowPolicy(long="truncate"))
