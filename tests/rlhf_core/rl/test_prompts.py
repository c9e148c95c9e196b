import pytest

from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.types import Prompt

PROMPTS = [Prompt(id=str(i), text=str(i), token_ids=(i,), row={}) for i in range(5)]


def ids(sampler: PromptSampler, count: int) -> list[str]:
    return [prompt.id for prompt in sampler.draw(count)]


def test_every_epoch_draws_every_prompt_once() -> None:
    drawn = ids(PromptSampler(PROMPTS, seed=0), 10)
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == list("01234")
    assert drawn[:5] != drawn[5:]


def test_the_order_depends_on_the_seed_and_not_on_the_batch_size() -> None:
    whole = ids(PromptSampler(PROMPTS, seed=3), 8)
    sampler = PromptSampler(PROMPTS, seed=3)
    assert ids(sampler, 3) + ids(sampler, 4) + ids(sampler, 1) == whole
    assert ids(PromptSampler(PROMPTS, seed=4), 8) != whole


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        PromptSampler([], seed=0)
