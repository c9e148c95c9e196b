import pytest

from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.types import Prompt

PROMPTS = [Prompt(id=str(i), text=str(i), token_ids=(i,), row={}) for i in range(5)]


def ids(sampler: PromptSampler, count: int) -> list[str]:
    return [prompt.id for prompt in sampler.draw(count, 0)]


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


@pytest.mark.parametrize("drawn", [0, 3, 5, 13])
def test_a_sampler_goes_on_where_another_stopped(drawn: int) -> None:
    stopped = PromptSampler(PROMPTS, seed=3)
    stopped.draw(drawn, 0)
    resumed = PromptSampler(PROMPTS, seed=3)
    resumed.load_state_dict(stopped.state_dict())
    assert ids(resumed, 8) == ids(stopped, 8)


def test_a_state_may_be_loaded_into_a_sampler_that_has_drawn() -> None:
    start = PromptSampler(PROMPTS, seed=3)
    used = PromptSampler(PROMPTS, seed=3)
    used.draw(7, 0)
    used.load_state_dict(start.state_dict())
    assert ids(used, 6) == ids(start, 6)
