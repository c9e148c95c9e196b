"""Episodes of several sequences: each episode counts once, and what trains does not depend on how it is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.algorithms import build_algorithm
from rlhf_core.config.rl.algorithm_table import ALGORITHMS
from rlhf_core.contract import Input
from rlhf_core.losses.aggregation import Aggregation, loss_weights
from rlhf_core.rl.experience import pack_hinted, pack_trajectories, require_finite, without_truncated
from rlhf_core.types import Branch, Prompt, Rollouts, Scored, TrainingBatch, Trajectory
from tests.rlhf_core.rl.one_rank import rl_config, trainer

pytestmark = pytest.mark.parts

REWARDS, GROUPS = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])


def sequence(*parts: tuple[bool, tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask. parts: whether it is trained, and tokens."""
    ids = torch.tensor([token for _, tokens in parts for token in tokens])
    return ids, torch.tensor([trained for trained, tokens in parts for _ in tokens])


def trajectory(prompt: int, *sequences: tuple[torch.Tensor, torch.Tensor], cut: bool = False) -> Trajectory:
    (ids, mask), *others = sequences
    return Trajectory(
        Prompt(str(prompt), "", (2, 3, 4 + prompt), row={}), ids, mask, torch.zeros(ids.numel()), 0,
        "length" if cut else "stop", branches=tuple(Branch(i, m, torch.zeros(i.numel())) for i, m in others),
    )  # fmt: skip


def episodes(*, cut_in_two: bool) -> list[Trajectory]:
    """Four, of which the first and the last have two replies: in one sequence, or with a sequence for each reply."""
    first, last = (2, 3, 4), (2, 3, 5)
    if cut_in_two:
        long = [
            (sequence((False, first), (False, (5, 6)), (False, (7,)), (True, (8, 9))),
             sequence((False, first), (True, (5, 6)))),
            (sequence((False, last), (False, (14,)), (False, (7,)), (True, (9, 10, 11))),
             sequence((False, last), (True, (14,)))),
        ]  # fmt: skip
    else:
        long = [
            (sequence((False, first), (True, (5, 6)), (False, (7,)), (True, (8, 9))),),
            (sequence((False, last), (True, (14,)), (False, (7,)), (True, (9, 10, 11))),),
        ]
    short = [sequence((False, first), (True, (12,))), sequence((False, last), (True, (10, 11, 12, 13)))]
    return [trajectory(0, *long[0]), trajectory(0, short[0]), trajectory(1, short[1]), trajectory(1, *long[1])]


def test_sequences_of_an_episode_are_packed_side_by_side() -> None:
    rollouts = pack_trajectories(episodes(cut_in_two=True))
    assert rollouts.sequence_lengths.tolist() == [8, 5, 4, 7, 8, 4]
    assert rollouts.episode_indices is not None
    assert rollouts.episode_indices.tolist() == rollouts.episodes.tolist() == [0, 0, 1, 2, 3, 3]
    assert rollouts.episode_lengths.tolist() == [13, 4, 7, 12]
    assert rollouts.episode_ids.tolist() == [0] * 13 + [1] * 4 + [2] * 7 + [3] * 12
    assert replace(rollouts, episode_indices=None).episode_lengths.tolist() == [8, 5, 4, 7, 8, 4]


def advantages(algorithm: str, rollouts: Rollouts, **settings: Any) -> TrainingBatch:
    names = ("values", "old_logprobs", "ref_logprobs", "teacher_logprobs")
    scored = Scored(**vars(rollouts), **{name: torch.zeros(rollouts.num_tokens) for name in names})
    return build_algorithm(rl_config(algorithm, **settings)).advantages(
        scored, REWARDS, GROUPS, 0.0, {"exact": REWARDS}
    )


def training_batch(rollouts: Rollouts) -> TrainingBatch:
    return TrainingBatch(**vars(rollouts), advantages=torch.zeros(rollouts.num_tokens))


def by_token(batch: TrainingBatch) -> list[list[tuple[int, float]]]:
    """Of each episode, token and advantage of all that is trained."""
    trained = batch.loss_mask
    found = zip(batch.episode_ids[trained], batch.input_ids[trained], batch.advantages[trained], strict=True)
    listed: list[list[tuple[int, float]]] = [[], [], [], []]
    for episode, token, advantage in found:
        listed[int(episode)].append((int(token), pytest.approx(float(advantage), abs=1e-6)))
    return [sorted(each, key=lambda pair: pair[0]) for each in listed]


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_advantages_are_those_of_the_episode_in_one_sequence(algorithm: str) -> None:
    """An episode counts once in the mean of its group: with a reward for each sequence it would count twice."""
    settings = {"gae_lambda": 1.0} if algorithm == "ppo" else {}  # else what is far from the reward gets less of it
    whole = advantages(algorithm, pack_trajectories(episodes(cut_in_two=False)), **settings)
    cut = advantages(algorithm, pack_trajectories(episodes(cut_in_two=True)), **settings)
    assert by_token(cut) == by_token(whole)
    if algorithm == "grpo":
        assert by_token(cut)[0] == [(token, pytest.approx(0.5**0.5, abs=1e-5)) for token in (5, 6, 8, 9)]


@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
def test_an_episode_has_the_weight_of_one_completion(kind: Aggregation) -> None:
    whole, cut = (pack_trajectories(episodes(cut_in_two=each)) for each in (False, True))
    weights = [loss_weights(e.loss_mask, e.episode_lengths, kind, length=8) for e in (whole, cut)]
    sums = [torch.zeros(4).index_add(0, e.episode_ids, w).tolist() for e, w in zip((whole, cut), weights, strict=True)]
    assert sums[0] == pytest.approx(sums[1])
    if kind == "sequence":
        assert sums[1] == pytest.approx([0.25] * 4)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        *((name, {}) for name in ALGORITHMS if name not in ("gspo", "gmpo", "ppo")), ("grpo", {"minibatches": 2}),
        ("rloo", {"kl": {"coefficient": 0.1, "place": "reward"}}),
        ("grpo", {"engine": {"dtype": "float32", "zero_stage": 0, "tokens_per_micro_batch": 100}}),
    ],
)  # fmt: skip
def test_an_update_does_not_depend_on_how_episodes_are_cut(
    algorithm: str, settings: dict[str, Any], model: Input, tmp_path: Path
) -> None:
    """GSPO and GMPO have one ratio for each sequence, and PPO's GAE goes along one."""
    probe = pack_trajectories(episodes(cut_in_two=False))
    after, metrics = [], []
    for cut_in_two in (False, True):
        config = rl_config(algorithm, **settings)
        ours, _ = trainer(config, model, tmp_path)
        scored = ours.score(pack_trajectories(episodes(cut_in_two=cut_in_two)))
        batch = build_algorithm(config).advantages(scored, REWARDS, GROUPS, ours.kl_coefficient, {"exact": REWARDS})
        metrics.append(ours.update(batch, 0).metrics)
        after.append(ours.probe(probe))
    assert after[0] == pytest.approx(after[1], abs=2e-5)
    assert metrics[0]["gradient_norm"] == pytest.approx(metrics[1]["gradient_norm"], rel=1e-4)
    assert metrics[0]["trained_completions"] == metrics[1]["trained_completions"] == 4.0


def test_minibatches_are_of_whole_episodes(model: Input, tmp_path: Path) -> None:
    ours, _ = trainer(rl_config("grpo", minibatches=2), model, tmp_path)
    parts = ours._minibatches(training_batch(pack_trajectories(episodes(cut_in_two=True))), order=0)
    assert [part.episode_lengths.numel() for part in parts] == [2, 2]
    found = [part.episode_indices.tolist() for part in parts if part.episode_indices is not None]
    assert sorted(index for part in found for index in part) == [0, 0, 1, 2, 3, 3]
    assert not set(found[0]) & set(found[1])


def test_a_truncated_episode_trains_in_none_of_its_sequences() -> None:
    first, *others = episodes(cut_in_two=True)
    trajectories = [replace(first, finish_reason="length"), *others]
    left = without_truncated(training_batch(pack_trajectories(trajectories)), trajectories)
    assert not left.loss_mask[:13].any()
    assert left.num_trained_tokens == 1 + 4 + 4


def test_what_is_wrong_is_named_by_its_row() -> None:
    trajectories = episodes(cut_in_two=True)
    batch = training_batch(pack_trajectories(trajectories))
    values = torch.zeros(batch.num_tokens)
    values[-1] = torch.inf
    with pytest.raises(Exception, match="row 1: of its advantages"):
        require_finite(replace(batch, advantages=values), trajectories)


def test_steps_and_hints_are_of_single_sequences() -> None:
    trajectories = episodes(cut_in_two=True)
    rollouts = pack_trajectories(trajectories)
    ends = torch.zeros_like(rollouts.loss_mask)
    with pytest.raises(ValueError, match="rewards of steps are of single sequences"):
        advantages("grpo", replace(rollouts, step_ends=ends, process_rewards=torch.zeros(rollouts.num_tokens)))
    hinted = [replace(t, prompt=replace(t.prompt, hinted_ids=(2, 3))) for t in trajectories]
    with pytest.raises(ValueError, match="a hint stands before one sequence"):
        pack_hinted(hinted)
