"""From what the rewards say to what a completion earns: worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rl.algorithms import GRPOConfig, RLOOConfig
from rlhf_core.errors import RewardError
from rlhf_core.rewards import RewardResult, build_reward, open_rewards
from rlhf_core.rewards.base import checked_result
from rlhf_core.rewards.text import RewardOfText
from rlhf_core.rl.rewarding import RewardPipeline, TrajectoryReward, monitor
from rlhf_core.types import Prompt, Trajectory
from tests.rlhf_core.stages.context import LocalContext

TOKENIZER = word_level_tokenizer([], context_length=64)
MAX_TOKENS = 8


class Values:
    """A reward that gives what it was made with."""

    def __init__(
        self, *values: Any, separator: str = "\n", tolerated: float = 0.0, may_not_apply: bool = False
    ) -> None:
        self._values = list(values)
        self._may_not_apply = may_not_apply
        self._tolerated = tolerated
        self._separator = separator

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Any]) -> RewardResult:
        result = checked_result(
            self._values, len(completions), "values", self._tolerated, may_not_apply=self._may_not_apply
        )
        return replace(result, separator=self._separator)

    def close(self) -> None: ...


def trajectory(completion: str, *, finished: bool = True, row: Mapping[str, Any] | None = None) -> Trajectory:
    sampled = TOKENIZER(completion, add_special_tokens=False)["input_ids"] + [TOKENIZER.eos_token_id] * finished
    token_ids = torch.tensor([7, 7, *sampled])
    mask = torch.arange(token_ids.numel()) >= 2
    reason = "stop" if finished else "length"
    prompt = Prompt("p", "p", (7, 7), row or {})
    return Trajectory(prompt, token_ids, mask, torch.zeros(token_ids.numel()), 0, reason, completion)


def pipeline(
    rewards: Mapping[str, Any], weights: Mapping[str, float] | None = None, kind: type[GRPOConfig] = GRPOConfig,
    **settings: Any,
) -> RewardPipeline:  # fmt: skip
    weights = weights or {}
    configs = {
        name: {
            "type": "function", "path": "r.py", "weight": weights.get(name, 1.0),
            "tolerated_failures": getattr(reward, "_tolerated", 0.0),
        } for name, reward in rewards.items()
    }  # fmt: skip
    config = kind.model_validate({"rewards": configs, "optimizer": {"learning_rate": 1.0}, **settings})
    made: dict[str, TrajectoryReward] = {name: RewardOfText(reward) for name, reward in rewards.items()}
    return RewardPipeline(config, MAX_TOKENS, made, TOKENIZER)


def judge(ours: RewardPipeline, *trajectories: Trajectory) -> list[Trajectory]:
    """One group, for which no reward fails."""
    (group,) = ours([list(trajectories)])
    assert group is not None
    return group


def test_rewards_are_summed_by_weight_and_kept_by_name() -> None:
    ours = pipeline({"a": Values(1.0, 2.0), "b": Values(10.0, -4.0)}, {"a": 0.5, "b": -2.0})
    first, second = judge(ours, trajectory("x"), trajectory("y"))
    assert (first.reward, second.reward) == (0.5 - 20.0, 1.0 + 8.0)
    assert (first.extra, second.extra) == ({"a": 1.0, "b": 10.0}, {"a": 2.0, "b": -4.0})
    assert first.step_rewards is None
    assert first.step_ends is None


def test_prompts_with_a_tolerated_failure_are_left_out_counted_and_in_no_statistic() -> None:
    """As if they had not been sampled: the running normalisation sees the rest alone."""
    failing = {"a": Values(1.0, None, 2.0, 6.0, tolerated=0.5), "b": Values(0.0, 0.0, 1.0, 1.0)}
    ours = pipeline(failing, shaping={"normalize": True}, group_size=2)
    alone = pipeline({"a": Values(2.0, 6.0), "b": Values(1.0, 1.0)}, shaping={"normalize": True}, group_size=2)
    four = [trajectory(text) for text in "wxyz"]
    failed, kept = ours([four[:2], four[2:]])
    assert failed is None
    assert kept is not None
    assert [t.completion for t in kept] == ["y", "z"]
    assert [t.reward for t in kept] == [t.reward for t in judge(alone, *four[2:])] == [-1.0, 1.0]
    assert [t.extra for t in kept] == [{"a": 2.0, "b": 1.0}, {"a": 6.0, "b": 1.0}]
    assert ours.take_failures() == {"reward/a/failures": 1.0}
    assert ours.take_failures() == {"reward/a/failures": 0.0}
    assert ours.state_dict() == alone.state_dict()


def test_a_reward_that_does_not_apply_adds_nothing_to_the_sum() -> None:
    sums = Values(1.0, None, may_not_apply=True)
    poems = Values({"reward": None, "lines": 0}, {"reward": 3.0, "lines": 2}, may_not_apply=True)
    ours = pipeline({"sums": sums, "poems": poems}, {"poems": 2.0})
    first, second = judge(ours, trajectory("a"), trajectory("b"))
    assert (first.reward, first.extra) == (1.0, {"sums": 1.0})
    assert (second.reward, second.extra) == (6.0, {"poems": 3.0, "poems/lines": 2.0})


def test_a_completion_that_no_reward_applies_to_is_a_failure() -> None:
    nothing = Values(1.0, None, may_not_apply=True)
    with pytest.raises(RewardError, match="completion 1, row p: no reward applies to it: a returned None"):
        pipeline({"a": nothing})([[trajectory("a"), trajectory("b")]])
    tolerant = pipeline({"a": Values(1.0, None, may_not_apply=True, tolerated=0.5)})
    judged, left_out = tolerant([[trajectory("a")], [trajectory("b")]])
    assert (judged is None, left_out) == (False, None)
    assert tolerant.take_failures() == {"reward/a/failures": 1.0}


def test_all_may_fail_and_nothing_is_left() -> None:
    ours = pipeline({"a": Values(None, 1.0, 1.0, None, tolerated=0.5)}, group_size=2)
    assert ours([[trajectory(text) for text in group] for group in ("wx", "yz")]) == [None, None]


def test_the_sum_is_shaped_and_the_score_is_not() -> None:
    shaping = {"overlong": {"buffer": 4, "penalty": 2.0}, "truncation": {"reward": -3.0}, "clip": (-2.0, 1.5)}
    values = Values(*[{"reward": 1.0, "score": 1.0}] * 3)
    ours = pipeline({"a": values}, {"a": 2.0}, shaping=shaping)
    # 2.0 clipped to 1.5; 6 tokens with EOS are 2 of 4 into the buffer: 2.0 - 1.0; cut: -3.0 clipped to -2.0.
    judged = judge(ours, trajectory("x"), trajectory("12345"), trajectory("12345678", finished=False))
    assert [t.reward for t in judged] == [1.5, 1.0, -2.0]
    assert [t.score for t in judged] == [1.0, 1.0, 1.0]
    assert judged[0].extra == {"a": 1.0}


def test_length_counts_what_the_policy_sampled() -> None:
    said = trajectory("12345")
    mask = said.loss_mask.clone()
    mask[3:5] = False  # said by an environment: 4 tokens are left, none of them in the buffer
    other = Trajectory(said.prompt, said.token_ids, mask, said.rollout_logprobs, 0, "stop", "1345")
    ours = pipeline({"a": Values(1.0, 1.0)}, shaping={"overlong": {"buffer": 4, "penalty": 2.0}})
    assert [t.reward for t in judge(ours, said, other)] == [0.0, 1.0]


def test_rewards_of_steps_are_weighted_and_placed_on_the_steps_last_tokens() -> None:
    values = Values({"reward": 1.0, "steps": [0.5, -1.0]}, {"reward": 0.0, "steps": [2.0]})
    ours = pipeline({"a": values}, {"a": 2.0}, shaping={"clip": (-0.1, 0.1)})
    first, second = judge(ours, trajectory("ab\ncd"), trajectory("\nx\n"))
    # 7 7 a b \n c d EOS, and 7 7 \n x \n EOS
    assert first.step_rewards is not None
    assert second.step_rewards is not None
    assert first.step_rewards.tolist() == [0, 0, 0, 0, 1.0, 0, 0, -2.0]
    assert second.step_rewards.tolist() == [0, 0, 0, 0, 0, 4.0]
    assert first.step_ends is not None
    assert first.step_ends.nonzero().flatten().tolist() == [4, 7]
    assert (first.reward, second.reward) == (0.1, 0.0)  # only the completion's own reward is clipped
    assert first.extra == {"a": 0.5, "a/steps": 2.0}  # 1.0 + 0.5 - 1.0: all that it gave


def test_rewards_that_cut_steps_differently_add_up_by_token() -> None:
    lines, words = (
        Values({"reward": 0.0, "steps": [1.0, 2.0]}),
        Values({"reward": 0.0, "steps": [10.0, 20.0, 30.0]}, separator=";"),
    )
    (judged,) = judge(pipeline({"lines": lines, "words": words, "plain": Values(5.0)}), trajectory("a;b;\nc"))
    assert judged.step_rewards is not None
    assert judged.step_rewards.tolist() == [0, 0, 0, 10.0, 0, 20.0, 1.0, 0, 32.0]
    assert judged.reward == 5.0


@pytest.mark.parametrize("given", [[1.0], [1.0, 2.0, 3.0]])
def test_a_wrong_number_of_steps_is_named(given: list[float]) -> None:
    values = Values({"reward": 0.0, "steps": [1.0]}, {"reward": 0.0, "steps": given})
    with pytest.raises(RewardError) as raised:
        judge(pipeline({"a": values}), trajectory("x"), trajectory("a\nb"))
    assert str(raised.value) == (
        f"reward a, completion 1 ('a\\nb'): expected 2 step rewards, given {len(given)}; steps are the non-blank parts "
        "between '\\n'"
    )


def test_steps_that_the_algorithm_cannot_use_are_an_error() -> None:
    values = Values({"reward": 0.0, "steps": [1.0]})
    with pytest.raises(RewardError, match="reward a gives `steps`, which this algorithm cannot use"):
        judge(pipeline({"a": values}, kind=RLOOConfig), trajectory("x"))  # type: ignore[arg-type]


SCORED, PLAIN = {"reward": 5.0, "score": 0.25}, {"reward": 1.0, "score": 1.0}


def test_the_score_is_that_of_the_only_reward_that_gives_one() -> None:
    (judged,) = judge(pipeline({"a": Values(3.0), "b": Values(SCORED)}), trajectory("x"))
    assert judged.score == 0.25
    assert judged.extra == {"a": 3.0, "b": 5.0}


def test_of_several_scores_the_named_one_filters_and_the_others_are_figures() -> None:
    (judged,) = judge(pipeline({"a": Values(SCORED), "b": Values(PLAIN)}, filtering={"score": "b"}), trajectory("x"))
    assert judged.score == 1.0
    assert judged.extra == {"a": 5.0, "b": 1.0, "a/score": 0.25}


def test_without_filtering_no_score_is_chosen_among_several() -> None:
    (judged,) = judge(pipeline({"a": Values(SCORED), "b": Values(PLAIN)}), trajectory("x"))
    assert judged.score is None
    assert judged.extra == {"a": 5.0, "b": 1.0, "a/score": 0.25, "b/score": 1.0}


@pytest.mark.parametrize(
    ("rewards", "filtering", "message"),
    [
        ({"a": Values(1.0)}, {}, "exactly one, or `filtering.score` to name it; the rewards that give scores are none"),
        ({"a": Values(SCORED), "b": Values(PLAIN)}, {}, "the rewards that give scores are a, b"),
        ({"a": Values(SCORED), "b": Values(1.0)}, {"score": "b"}, "one from `b`; the rewards that give scores are a"),
    ],
)
def test_filtering_without_its_score_is_an_error(
    rewards: dict[str, Values], filtering: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError) as raised:
        judge(pipeline(rewards, filtering=filtering), trajectory("x"))
    assert message in str(raised.value)


def test_a_score_of_some_completions_only_does_not_filter() -> None:
    with pytest.raises(RewardError, match="needs a score of every completion"):
        judge(pipeline({"a": Values(SCORED, 1.0)}, filtering={}), trajectory("x"), trajectory("y"))


class Given(Values):
    """A reward of trajectories, such as a model's or an environment's, that nobody else checks."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:  # type: ignore[override]
        return RewardResult(self._values, [None] * len(self._values))


@pytest.mark.parametrize(
    ("values", "weight", "says"),
    [
        ((1.0, 1e39), 1.0, "reward a, completion 1, row p: the reward is 1e+39, expected a finite number"),
        ((1.0, float("inf")), 1.0, "reward a, completion 1, row p: the reward is inf"),
        ((float("nan"), 1.0), 1.0, "reward a, completion 0, row p: the reward is nan"),
        ((10**400, 1.0), 0.0, "reward a, completion 0, row p: the reward is an integer of 1329 bits"),
        ((1.0, 1e35), -1e5, r"completion 1, row p: the reward times its weight -100000 is -1e\+40"),
        ((3e38, 1.0), 1.0, r"completion 0, row p: the shaped reward is 6e\+38, which float32 does not hold"),
    ],
)
def test_a_reward_that_float32_does_not_hold_is_an_error(values: Sequence[Any], weight: float, says: str) -> None:
    ours = pipeline({"a": Values(), "b": Values(3e38, 0.0)}, {"a": weight})
    ours._rewards = {**ours._rewards, "a": Given(*values)}  # type: ignore[dict-item]
    with pytest.raises(RewardError, match=says.replace("+39", r"\+39")):
        judge(ours, trajectory("x"), trajectory("y"))


def test_a_reward_of_a_step_that_float32_does_not_hold_is_an_error() -> None:
    for steps, says in {
        (1e39,): "values, completion 0: the reward of step 0 is 1e",
        (3e38,): "times its weight 2 ",
    }.items():
        with pytest.raises(RewardError, match=says):
            judge(pipeline({"a": Values({"reward": 0.0, "steps": list(steps)})}, {"a": 2.0}), trajectory("x"))
    both = {"a": Values({"reward": 0.0, "steps": [3e38]}), "b": Values({"reward": 0.0, "steps": [3e38]})}
    with pytest.raises(RewardError, match="sum of the rewards of its steps is inf"):
        judge(pipeline(both), trajectory("x"))


def test_the_statistics_of_rewards_are_state() -> None:
    shaping = {"normalize": True}
    ours, other = (pipeline({"a": Values(1.0, 4.0)}, shaping=shaping) for _ in range(2))
    two = [trajectory("x"), trajectory("y")]
    first = [t.reward for t in judge(ours, *two)]
    other.load_state_dict(ours.state_dict())
    assert [t.reward for t in judge(ours, *two)] == [t.reward for t in judge(other, *two)]
    assert first == [-1.0, 1.0]


def test_monitors_are_means_of_what_they_say() -> None:
    assert monitor([trajectory("x"), trajectory("y")], {"m": RewardOfText(Values(1.0, 0.0))}) == {"monitor/m": 0.5}


@pytest.mark.parts
def test_a_users_function_gives_steps_through_its_process(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "import numpy as np\n"
        "def reward(completions, prompts, rows):\n"
        "    steps = [[s for s in c.split('\\n') if s.strip()] or [c] for c in completions]\n"
        "    return [{'reward': r['bonus'], 'score': 1, 'steps': np.array([len(s) for s in own])}\n"
        "            for own, r in zip(steps, rows)]\n"
    )
    config = GRPOConfig.model_validate({
        "rewards": {"own": {"type": "function", "path": "r.py"}}, "optimizer": {"learning_rate": 1.0}
    })  # fmt: skip
    context = LocalContext(tmp_path / "work", user_files_root=tmp_path)
    reward = build_reward(config.driver_rewards["own"], context)
    try:
        ours = RewardPipeline(config, MAX_TOKENS, {"own": reward}, TOKENIZER)
        judged = judge(ours, trajectory("abc\nd", row={"bonus": 0.5}), trajectory("", row={"bonus": 1.5}))
    finally:
        reward.close()
    assert [(t.reward, t.score) for t in judged] == [(0.5, 1.0), (1.5, 1.0)]
    assert judged[0].step_rewards is not None
    assert judged[0].step_rewards.tolist() == [0, 0, 0, 0, 0, 3.0, 0, 1.0]
    assert judged[1].step_ends is not None
    assert judged[1].step_ends.tolist() == [False, False, True]


@pytest.mark.parts
def test_verifiers_of_mathematics_and_code_reward_and_count_what_ran_out_of_time(tmp_path: Path) -> None:
    config = GRPOConfig.model_validate({
        "rewards": {
            "math": {"type": "verifier", "kind": "math", "weight": 2.0},
            "code": {"type": "verifier", "kind": "code_tests", "timeout_seconds": 1.0},
        },
        "filtering": {"score": "code"}, "optimizer": {"learning_rate": 1.0},
    })  # fmt: skip
    row = {"answer": "1/2", "tests": "assert x == 0.5"}
    texts = ("x = 0.5", "x = 0.4", "while True: pass")
    with open_rewards(config.driver_rewards, LocalContext(tmp_path)) as rewards:
        ours = RewardPipeline(config, MAX_TOKENS, rewards, TOKENIZER)
        judged = judge(ours, *(trajectory(text, row=row) for text in texts))
    assert [(t.reward, t.score) for t in judged] == [(3.0, 1.0), (0.0, 0.0), (0.0, 0.0)]
    assert [t.extra["code/timed_out"] for t in judged] == [0.0, 0.0, 1.0]
    assert [t.extra["math/timed_out"] for t in judged] == [0.0, 0.0, 0.0]
