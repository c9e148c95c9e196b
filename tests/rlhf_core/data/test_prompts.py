from __future__ import annotations

import pytest

from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.data.fitting import RowPolicy
from rlhf_core.data.prompts import fit_prompts
from rlhf_core.errors import StageError
from rlhf_core.rewards.templates import hint_of

ROWS = [{"id": name, "prompt": [{"role": "user", "content": name * length}]} for name, length in (("a", 5), ("b", 6))]


def test_prompts_that_are_too_long_are_dropped_and_counted() -> None:
    """A prompt is <bos> <user> and its letters and <assistant>."""
    tokenizer = word_level_tokenizer((), 64)
    fitted = fit_prompts(ROWS, tokenizer, max_tokens=8, policy=RowPolicy(long="drop"))
    assert [prompt.id for prompt in fitted.rows] == ["a"]
    assert fitted.metrics() == {"rows_read": 2, "rows_dropped_too_long": 1}
    everything = fit_prompts(ROWS, tokenizer, max_tokens=9, policy=RowPolicy(long="drop"))
    assert everything.metrics() == {"rows_read": 2, "rows_dropped_too_long": 0}
    with pytest.raises(StageError, match=r"^prompt b \('bbbbbb'\) has 9 tokens, more than the 8"):
        fit_prompts(ROWS, tokenizer, max_tokens=8, policy=RowPolicy())
    with pytest.raises(StageError, match="a prompt that is cut asks another question"):
        fit_prompts(ROWS, tokenizer, max_tokens=8, policy=RowPolicy(long="truncate"))


def test_a_hint_stands_behind_the_last_message_of_the_user_and_must_fit_too() -> None:
    tokenizer = word_level_tokenizer((), 64)
    rows = [{**row, "answer": "xy"} for row in ROWS]
    hint = hint_of("{{ row.answer }}{{ prompt[0] }}")
    first, second = fit_prompts(rows, tokenizer, max_tokens=12, policy=RowPolicy(), hint=hint).rows
    assert tokenizer.decode(first.token_ids) == "<bos><user>aaaaa<assistant>"
    assert tokenizer.decode(first.hinted_ids) == "<bos><user>aaaaaxya<assistant>"
    assert (first.text, second.text) == ("aaaaa", "bbbbbb")
    with pytest.raises(StageError, match=r"^prompt b \('bbbbbb'\) has 12 tokens with its hint, more than the 11"):
        fit_prompts(rows, tokenizer, max_tokens=11, policy=RowPolicy(), hint=hint)
    with pytest.raises(StageError, match=r"row a: teacher.hint: .* has no attribute 'answer'"):
        fit_prompts(ROWS, tokenizer, max_tokens=20, policy=RowPolicy(), hint=hint)
    assert fit_prompts(ROWS, tokenizer, max_tokens=20, policy=RowPolicy()).rows[0].hinted_ids == ()
