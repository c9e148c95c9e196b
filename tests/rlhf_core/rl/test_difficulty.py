"""Draws by pass rates: which prompts are drawn, when bounds move, and what is never forgotten."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from rlhf_core.config.rl.difficulty import SelectConfig
from rlhf_core.errors import StageError
from rlhf_core.rl.difficulty import SelectedPrompts
from rlhf_core.rl.pass_rates import PassRate, PassRates, prompt_identity
from rlhf_core.types import Prompt, Trajectory

PROMPTS = [
    Prompt(str(i), str(i), (i,), {"prompt": [{"role": "user", "content": str(i)}], "answer": str(i)}) for i in range(5)
]


def selected(known: Mapping[int, float], seed: int = 0, **settings: Any) -> SelectedPrompts:
    """known: rates from before the run, by prompt."""
    rates = {prompt_identity(PROMPTS[i].row): PassRate(rate, 8, 0) for i, rate in known.items()}
    config = SelectConfig.model_validate({"pass_rate": (0.1, 0.9), **settings})
    return SelectedPrompts(PROMPTS, seed, config, PassRates("reward", rates))


def drawn(prompts: SelectedPrompts, count: int, step: int = 0) -> str:
    return "".join(sorted(prompt.id for prompt in prompts.draw(count, step)))


def group(prompt: int, scores: Sequence[float | None]) -> list[Trajectory]:
    nothing = torch.zeros(0)
    return [Trajectory(PROMPTS[prompt], nothing, nothing, nothing, 0, "stop", score=score) for score in scores]


def test_prompts_within_the_bounds_and_unknown_ones_are_drawn() -> None:
    # 0 and 4 are hopeless and solved; the bounds themselves are within.
    assert drawn(selected({0: 0.0, 1: 0.1, 2: 0.9, 4: 1.0}), 6) == "112233"


def test_draws_keep_the_order_of_the_epoch() -> None:
    every, some = selected({}, seed=3), selected({0: 0.0}, seed=3)
    order = [prompt.id for prompt in every.draw(10, 0)]
    assert [prompt.id for prompt in some.draw(8, 0)] == [prompt for prompt in order if prompt != "0"]


def test_the_newest_completions_decide() -> None:
    prompts = selected({0: 0.5, 1: 0.5})
    prompts.observe([group(0, [1.0, 1.0]), group(2, [0.0, 0.0]), group(3, [1.0, 0.0])], 0)
    assert drawn(prompts, 6, 1) == "113344"
    prompts.observe([group(0, [1.0, 0.0])], 1)
    assert drawn(prompts, 4, 2) == "0134"


def test_a_curriculum_moves_the_bounds_from_easy_to_hard() -> None:
    prompts = selected(
        {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}, pass_rate=(0.0, 0.5), curriculum={"start": (0.5, 1.0), "steps": 4}
    )
    by_step = {step: "".join(sorted(set(drawn(prompts, 10, step)))) for step in range(6)}
    # The lowest is 0.5, 0.375, 0.25, 0.125, 0, 0, and the highest 1, 0.875, 0.75, 0.625, 0.5, 0.5.
    assert by_step == {0: "234", 1: "23", 2: "123", 3: "12", 4: "012", 5: "012"}


def test_a_rate_is_forgotten_after_as_many_steps() -> None:
    prompts = selected({}, forget_after=3)
    prompts.observe([group(each, [1.0]) for each in range(4)], 2)  # the third step
    assert drawn(prompts, 2, 5) == "44"
    assert set(drawn(prompts, 10, 6)) == set("01234")


def test_rates_of_earlier_artifacts_are_forgotten_too() -> None:
    prompts = selected(dict.fromkeys(range(4), 0.0), forget_after=1)
    assert drawn(prompts, 2, 0) == "44"
    assert set(drawn(prompts, 10, 1)) == set("01234")


def test_if_none_is_within_the_bounds_the_nearest_is_drawn() -> None:
    prompts = selected({0: 0.0, 1: 1.0, 2: 0.02, 3: 0.0, 4: 1.0})
    assert drawn(prompts, 3) == "222"
    assert prompts.metrics(0)["difficulty/outside"] == 3
    assert prompts.metrics(1)["difficulty/outside"] == 0


def test_if_none_is_within_the_bounds_the_run_may_stop() -> None:
    prompts = selected(dict.fromkeys(range(5), 1.0), when_none="stop")
    with pytest.raises(StageError, match=r"step 3: no prompt has a pass rate from 0.1 to 0.9: widen"):
        prompts.draw(1, 3)


def test_the_shares_of_solved_mixed_and_hopeless_prompts() -> None:
    prompts = selected({0: 0.0, 1: 0.5, 2: 1.0})
    prompts.observe([group(1, [1.0, 1.0])], 0)
    assert prompts.metrics(0) == {
        "difficulty/known_share": 0.6, "difficulty/lowest": 0.1, "difficulty/highest": 0.9, "difficulty/outside": 0,
        "difficulty/solved_share": 2 / 3, "difficulty/mixed_share": pytest.approx(0, abs=1e-12),
        "difficulty/hopeless_share": 1 / 3,
    }  # fmt: skip


@pytest.mark.parametrize("stop", [0, 1, 3, 7])
def test_a_resumed_run_draws_what_the_other_would_have_drawn(stop: int) -> None:
    def steps(prompts: SelectedPrompts, first: int, last: int) -> list[str]:
        ids = []
        for step in range(first, last):
            for prompt in prompts.draw(2, step):
                ids.append(prompt.id)
                # 0 is always right, 1 in even steps, the others by halves.
                score = float(prompt.id == "0" or (prompt.id == "1" and step % 2 == 0))
                prompts.observe([group(int(prompt.id), [score, score if prompt.id in "01" else 1.0])], step)
            prompts.metrics(step)
        return ids

    settings: dict[str, Any] = {"forget_after": 4, "curriculum": {"start": (0.5, 1.0), "steps": 5}}
    whole, stopped, resumed = (selected({2: 0.0, 3: 0.3}, seed=5, **settings) for _ in range(3))
    ids = steps(whole, 0, 12)
    steps(stopped, 0, stop)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert steps(resumed, stop, 12) == ids[2 * stop :]
    assert resumed.state_dict() == whole.state_dict()


def test_a_completion_without_a_score_is_an_error() -> None:
    with pytest.raises(StageError, match="select: the reward gave a completion no score"):
        selected({}).observe([group(0, [1.0, None])], 0)


def test_rates_of_other_prompts_are_an_error() -> None:
    rates = PassRates("reward", {"another prompt": PassRate(0.5, 8, 0)})
    with pytest.raises(StageError, match=r"select\.rates: no prompt of the dataset has a pass rate there"):
        SelectedPrompts(PROMPTS, 0, SelectConfig(pass_rate=(0.1, 0.9)), rates)
