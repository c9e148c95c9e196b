"""Dynamic filtering and its refill: which prompts are asked, which groups train, and what is never lost or repeated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.episodes.rollouter import Rollouter
from rlhf_core.errors import StageError
from rlhf_core.rewards.base import RewardResult
from rlhf_core.rewards.text import RewardOfText
from rlhf_core.rl.collector import SyncCollector
from rlhf_core.rl.phases import PhaseTimer
from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.rl.rewarding import RewardPipeline
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.rl.stored import StoredGroups
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.types import Prompt, Trajectory

ROW = {"prompt": [{"role": "user", "content": "?"}]}
TOKENIZER = word_level_tokenizer([], context_length=64)
RIGHT, WRONG, MIXED, MOSTLY = "right", "wrong", "mixed", "mostly"  # how a prompt is answered, always


class Answered:
    """The score is 1 for an answer that begins with "r"; keeps how many completions each call judged."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.fails = False
        self.failing = 0  # further calls, of more than one completion's group

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Any]) -> RewardResult:
        self.calls.append(len(completions))
        scores = [float(c.startswith("r")) for c in completions]
        some_fail = self.failing > 0 and len(completions) > 4
        self.failing -= some_fail
        failures = {0: "why"} if self.fails or some_fail else {}
        return RewardResult([2 * score for score in scores], list(scores), failures=failures)

    def close(self) -> None: ...


class Setup:
    """A collector over prompts that are answered as they say, in the order given; no two completions are the same."""

    def __init__(
        self,
        answers: Sequence[str],
        wanted: int,
        group_size: int = 4,
        replay: dict[str, Any] | None = None,
        **filtering: Any,
    ) -> None:
        config = RLConfig.model_validate({
            "algorithm": "grpo", "dataset": "p", "steps": 9, "prompts_per_step": wanted, "replay": replay,
            "sampling": {"max_tokens": 16}, "rollout": {"max_length": 32},
            "grpo": {
                "rewards": {"own": {"type": "verifier"}}, "group_size": group_size,
                "optimizer": {"learning_rate": 1.0}, "filtering": filtering or None,
                "mismatch": None,
            },
        })  # fmt: skip
        self.completions = 0
        self.judge, self.monitor = Answered(), Answered()
        prompts = [Prompt(f"{i} {answer}", answer, (50 + i,), ROW) for i, answer in enumerate(answers)]
        self.prompts = InOrder(prompts)
        engines = InlineEngines(ScriptedEngine(self._script, max_length=32))
        self._by_token = dict(zip(range(50, 50 + len(answers)), answers, strict=True))
        self.collector = SyncCollector(
            config,
            self.prompts,
            RolloutSampler(config, Rollouter(engines, TOKENIZER, config.rollout), 0),
            RewardPipeline(config.settings, 16, {"own": RewardOfText(self.judge)}, TOKENIZER),
            {"all": RewardOfText(self.monitor)},
            StoredGroups(),
        )

    def _script(self, prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        first_of_group = self.completions % 4 == 0
        self.completions += 1
        answer = self._by_token[prompt[0]]
        right = answer == RIGHT or (answer == MIXED and first_of_group) or (answer == MOSTLY and not first_of_group)
        text = f"{'r' if right else 'w'}{self.completions}"
        return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]

    def collect(self, step: int = 0) -> tuple[list[Trajectory], dict[str, float]]:
        return self.collector.collect(step, PhaseTimer())


class InOrder(PromptSampler):
    """Every epoch in the order given, so that a test can say what is drawn."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        super().__init__(prompts, seed=0)
        self.drawn: list[str] = []

    def draw(self, count: int, step: int) -> list[Prompt]:
        drawn = [self._prompts[(self._drawn + i) % len(self._prompts)] for i in range(count)]
        self._drawn += count
        self.drawn += [prompt.id for prompt in drawn]
        return drawn


def groups(trajectories: Sequence[Trajectory], size: int = 4) -> list[str]:
    """The prompt of each group, whose completions must stand side by side."""
    found = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
    assert all(len({t.prompt.id for t in group}) == 1 for group in found)
    return [group[0].prompt.id for group in found]


def test_a_step_without_any_reward_is_an_error() -> None:
    setup = Setup([RIGHT], wanted=1)
    setup.judge.fails = True
    with pytest.raises(StageError, match="step 0: of every prompt an episode failed, or did not get its reward"):
        setup.collect()


def test_without_filtering_one_round_is_all_that_is_drawn() -> None:
    setup = Setup([RIGHT, WRONG, MIXED], wanted=3)
    trajectories, figures = setup.collect()
    assert groups(trajectories) == ["0 right", "1 wrong", "2 mixed"]
    assert figures == {"monitor/all": (8 + 0 + 2) / 12}
    assert setup.judge.calls == [12]


def test_groups_that_teach_nothing_are_replaced_by_new_prompts() -> None:
    setup = Setup([RIGHT, MIXED, WRONG, RIGHT, MIXED, WRONG, MIXED], wanted=3, max_rounds=4)
    trajectories, figures = setup.collect()
    # Rounds: right mixed wrong; right mixed; wrong; mixed.
    assert setup.judge.calls == [12, 8, 4, 4]
    assert groups(trajectories) == ["1 mixed", "4 mixed", "6 mixed"]
    assert [t.score for t in trajectories] == [1.0, 0.0, 0.0, 0.0] * 3
    assert [t.reward for t in trajectories] == [2.0, 0.0, 0.0, 0.0] * 3
    assert figures == {
        "monitor/all": 2 * (8 + 3) / 28,  # the monitor here gives rewards of 2, and sees all 28 completions
        "filtering/rounds": 4,
        "filtering/groups": 7,
        "filtering/kept_share": pytest.approx(3 / 7),
        "filtering/all_wrong_share": pytest.approx(2 / 7),
        "filtering/all_right_share": pytest.approx(2 / 7),
        "filtering/surplus": 0,
        "filtering/score": pytest.approx((2 * 1.0 + 3 * 0.25) / 7),
    }
    assert setup.monitor.calls == [28]


def trained_for(setup: Setup, steps: int) -> None:
    for step in range(steps):
        setup.collector.trained(setup.collect(step)[0])


ANSWERS = [RIGHT, MIXED, WRONG, RIGHT, MIXED, WRONG, MIXED]
FILTERED: dict[str, Any] = {"wanted": 2, "max_rounds": 9, "oversampling": 3.0}


def test_every_prompt_that_is_drawn_ends_somewhere() -> None:
    setup = Setup(ANSWERS, **FILTERED)
    trained_for(setup, 9)
    counts = setup.collector.proven()
    assert (counts["steps"], counts["prompts_trained"], counts["prompts_drawn"]) == (9, 18, len(setup.prompts.drawn))
    ended = sum(counts[f"prompts_{end}"] for end in ("trained", "filtered", "surplus", "failed"))
    assert ended == counts["prompts_drawn"]
    assert counts["prompts_filtered"] > 0 < counts["prompts_surplus"]


def test_a_resumed_run_has_the_counts_of_one_that_was_not_stopped() -> None:
    whole, stopped, resumed = (Setup(ANSWERS, **FILTERED) for _ in range(3))
    trained_for(whole, 9)
    trained_for(stopped, 4)
    resumed.collector.load_state_dict(json.loads(json.dumps(stopped.collector.state_dict())))
    trained_for(resumed, 5)
    assert resumed.collector.proven() == whole.collector.proven()


def test_prompts_that_fail_are_replaced_where_steps_have_rounds() -> None:
    without, with_rounds = Setup([MIXED] * 3, wanted=2), Setup([MIXED] * 3, wanted=2, max_rounds=9)
    for setup, trained in ((without, 9), (with_rounds, 18)):
        setup.judge.failing = 9  # of the first completion of a call
        trained_for(setup, 9)
        counts = setup.collector.proven()
        assert (counts["prompts_trained"], counts["prompts_failed"]) == (trained, 9)


def test_prompts_that_are_lost_are_an_error() -> None:
    skipped, short, lost = (Setup(ANSWERS, **FILTERED) for _ in range(3))
    trained_for(skipped, 9)
    skipped.prompts.draw(1, 0)
    with pytest.raises(StageError, match=r"give \d+ prompts drawn, but the stage counted \d+: nothing is published"):
        skipped.collector.proven()
    trained_for(short, 8)
    with pytest.raises(StageError, match="give 9 steps, but the stage counted 8"):
        short.collector.proven()
    trained_for(lost, 8)
    lost.collector.trained(lost.collect(8)[0][:4])  # one prompt of two
    with pytest.raises(StageError, match="give 18 prompts trained, but the stage counted 17"):
        lost.collector.proven()


@pytest.mark.parametrize(
    ("answer", "low", "high", "kept"),
    [(MIXED, 0.0, 1.0, True), (MIXED, 0.25, 1.0, False), (MOSTLY, 0.0, 0.75, False), (MIXED, 0.2, 0.3, True)],
)
def test_the_range_is_open_at_both_ends(answer: str, low: float, high: float, kept: bool) -> None:
    setup = Setup([answer], wanted=1, low=low, high=high, max_rounds=1)  # one of four is right, or three are
    if kept:
        assert groups(setup.collect()[0]) == [f"0 {answer}"]
        return
    with pytest.raises(StageError):
        setup.collect()


def test_a_surplus_is_dropped_and_counted_and_its_prompts_are_not_drawn_again() -> None:
    setup = Setup([MIXED, MIXED, RIGHT, MIXED, MIXED, MIXED, WRONG], wanted=2, oversampling=1.5)
    trajectories, figures = setup.collect(0)
    assert setup.prompts.drawn == ["0 mixed", "1 mixed", "2 right"]  # 2 x 1.5
    assert groups(trajectories) == ["0 mixed", "1 mixed"]
    assert figures["filtering/surplus"] == 0
    trajectories, figures = setup.collect(1)
    assert groups(trajectories) == ["3 mixed", "4 mixed"]
    assert figures["filtering/surplus"] == 1
    assert setup.collect(2)[1]["filtering/rounds"] == 1
    assert setup.prompts.drawn[6:] == ["6 wrong", "0 mixed", "1 mixed"]


def test_a_refill_rounds_up_what_is_missing() -> None:
    setup = Setup([RIGHT, RIGHT, RIGHT, MIXED, MIXED], wanted=1, oversampling=2.5)
    trajectories, figures = setup.collect()
    assert setup.judge.calls == [12, 12]  # three prompts each
    assert groups(trajectories) == ["3 mixed"]
    assert figures["filtering/surplus"] == 1


def test_where_the_prompts_end_the_next_epoch_goes_on_and_nothing_kept_is_lost() -> None:
    setup = Setup([RIGHT, MIXED, WRONG], wanted=3, max_rounds=8)
    trajectories, _ = setup.collect()
    assert groups(trajectories) == ["1 mixed"] * 3
    assert len({t.completion for t in trajectories}) == 12  # three groups, each sampled for itself
    assert setup.prompts.drawn == [
        "0 right",
        "1 mixed",
        "2 wrong",
        "0 right",
        "1 mixed",
        "2 wrong",
        "0 right",
        "1 mixed",
    ]


def test_too_few_groups_train_where_that_is_wanted() -> None:
    setup = Setup([MIXED, RIGHT, RIGHT, WRONG], wanted=2, max_rounds=3, when_short="train")
    trajectories, figures = setup.collect()
    assert groups(trajectories) == ["0 mixed"]
    assert (figures["filtering/rounds"], figures["filtering/groups"]) == (3, 4)


def test_too_few_groups_end_the_run_where_that_is_wanted() -> None:
    setup = Setup([MIXED, RIGHT, RIGHT, WRONG], wanted=2, max_rounds=3, when_short="stop")
    with pytest.raises(StageError) as raised:
        setup.collect(step=7)
    assert str(raised.value) == (
        "step 7: dynamic filtering kept 1 of the 2 prompts that a step needs, in 3 rounds of sampling: of 4 prompts "
        "25% were answered all wrong, 50% all right; choose prompts that this model answers right at times"
    )


@pytest.mark.parametrize("when_short", ["train", "stop"])
def test_no_group_at_all_ends_the_run(when_short: str) -> None:
    setup = Setup([RIGHT, WRONG, WRONG, WRONG], wanted=2, max_rounds=4, when_short=when_short)
    with pytest.raises(
        StageError, match=r"kept 0 of the 2 .* in 4 rounds .* 75% were answered all wrong, 25% all right"
    ):
        setup.collect()


def test_a_resumed_collector_collects_what_the_other_would_have() -> None:
    answers = [MIXED, RIGHT, WRONG, MIXED, MIXED, RIGHT, MIXED]
    whole, resumed = Setup(answers, wanted=2, max_rounds=9), Setup(answers, wanted=2, max_rounds=9)
    whole.collect(0)
    whole.collect(1)
    resumed.collector.load_state_dict(json.loads(json.dumps(whole.collector.state_dict())))
    resumed.completions = whole.completions
    for step in (2, 3):
        ours, theirs = whole.collect(step), resumed.collect(step)
        assert [t.completion for t in ours[0]] == [t.completion for t in theirs[0]]
        assert ours[1] == theirs[1]


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(st.sampled_from([RIGHT, WRONG, MIXED]), min_size=1, max_size=12),
    wanted=st.integers(1, 4),
    oversampling=st.sampled_from([1.0, 1.5, 3.0]),
)
def test_kept_groups_teach_something_and_none_comes_twice(answers: list[str], wanted: int, oversampling: float) -> None:
    setup = Setup(answers, wanted=wanted, oversampling=oversampling, max_rounds=6)
    seen: set[str] = set()
    for step in range(3):
        try:
            trajectories, figures = setup.collect(step)
        except StageError:
            assert MIXED not in answers or len(answers) > wanted
            continue
        assert all(prompt.endswith(MIXED) for prompt in groups(trajectories))
        assert len(trajectories) <= 4 * wanted
        assert len(trajectories) == 4 * wanted or figures["filtering/rounds"] == 6
        completions = {t.completion for t in trajectories}
        assert len(completions) == len(trajectories)
        assert not completions & seen
        seen |= completions
    assert setup.completions == 4 * len(setup.prompts.drawn)


REPLAYED = [MIXED, RIGHT, MIXED, MIXED, WRONG, MOSTLY, RIGHT, MIXED]


def test_mixed_groups_are_replayed_in_place_of_draws() -> None:
    setup = Setup(REPLAYED, wanted=2, replay={"share": 0.5})
    steps = [groups(setup.collect(step)[0]) for step in range(5)]
    # The first step has nothing to replay; of "1 right" and of "4 wrong" nothing is kept.
    assert steps == [["0 mixed", "1 right"], ["2 mixed", "0 mixed"], ["3 mixed", "2 mixed"], ["4 wrong", "3 mixed"],
                     ["5 mostly", "6 right"]]  # fmt: skip
    assert setup.completions == 4 * (2 + 1 + 1 + 1 + 2)


def test_counts_know_what_was_replayed() -> None:
    setup = Setup(REPLAYED, wanted=2, replay={"share": 0.5})
    trained_for(setup, 9)
    counts = setup.collector.proven()
    assert counts["prompts_trained"] == 18 == counts["prompts_drawn"] + counts["prompts_replayed"]
    assert counts["prompts_replayed"] > 4


def test_a_resumed_run_replays_what_the_other_would_have_replayed() -> None:
    whole, stopped, resumed = (Setup(REPLAYED, wanted=2, replay={"share": 0.5, "max_age": 2}) for _ in range(3))
    expected = [groups(whole.collect(step)[0]) for step in range(7)]
    for step in range(3):
        stopped.collect(step)
    resumed.collector.load_state_dict(json.loads(json.dumps(stopped.collector.state_dict())))
    resumed.completions = stopped.completions
    assert [groups(resumed.collect(step)[0]) for step in range(3, 7)] == expected[3:]
