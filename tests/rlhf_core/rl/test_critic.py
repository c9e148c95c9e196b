"""The critic of a training rank: the values it starts from, and what is kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification

from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.contract import Input
from rlhf_core.models.folders.folder import update_json
from rlhf_core.rl.worker import RLWorker
from tests.rlhf_core.rl.one_rank import rl_config, trainer, trajectories, with_advantages
from tests.rlhf_core.stages.context import local_input

pytestmark = pytest.mark.parts

TASTE = {"type": "reward_model"}


@pytest.mark.parametrize(
    ("rewards", "shaping", "factor", "offset"),
    [
        ({"taste": TASTE}, {}, 0.5, -2.45),
        ({"taste": {**TASTE, "weight": -3.0}}, {}, -1.5, 7.35),
        ({"taste": {**TASTE, "weight": 3.0, "normalize": False}}, {}, 3.0, 0.0),
        ({"taste": TASTE, "lines": {"type": "process_reward_model", "weight": 0.5}}, {}, 0.75, -3.675),
        ({"taste": {**TASTE, "weight": 0.0}, "exact": {"type": "verifier"}}, {}, 0.5, -2.45),
        ({"taste": {**TASTE, "weight": -3.0, "normalize": False}}, {"normalize": True}, -0.5, 2.45),
        ({"exact": {"type": "verifier"}}, {}, 0.5, -2.45),
    ],
)
def test_a_critic_starts_on_the_scale_of_the_rewards(
    rewards: dict[str, Any], shaping: dict[str, Any], factor: float, offset: float, model: Input, tmp_path: Path
) -> None:
    """Of a reward model whose scores have mean 4.9 and deviation 2. What is saved reads the same values."""
    classifier, judge = tiny_reward_model(model, tmp_path / "reward", mean=4.9, std=2.0)
    others = {f"ppo.rewards.{name}.model": judge for name, reward in rewards.items() if "model" in reward["type"]}
    config = rl_config("ppo", rewards=rewards, shaping=shaping, critic={"start": "judge", "save": True})
    ours, group = trainer(config, model, tmp_path / "work", {**others, "ppo.critic.start": judge})
    values = ours.score(trajectories()).values
    assert_values(values, classifier, factor, offset)

    group.call(RLWorker.save, tmp_path / "out")
    saved = local_input(tmp_path / "out" / "critic", Kind.REWARD_MODEL)
    again = rl_config("ppo", critic={"start": "saved"})
    ours, _ = trainer(again, model, tmp_path / "again", {"ppo.critic.start": saved})
    torch.testing.assert_close(ours.score(trajectories()).values, values, atol=1e-6, rtol=0)


def test_the_first_advantages_are_not_biased_by_the_reward_models_mean(model: Input, tmp_path: Path) -> None:
    """With gamma 1 and lambda 0 an advantage is reward + next value - value: all on one scale. The value of the last
    token is the score before it; raw, it would be 4.9 too high."""
    classifier, judge = tiny_reward_model(model, tmp_path / "reward", mean=4.9, std=2.0)
    with torch.no_grad():
        classifier.score.weight.zero_()  # so that each score, and each reward, is the same: 0 raw, -2.45 normalised
    classifier.config.update({"reward_mean": 4.9, "reward_std": 2.0})
    classifier.save_pretrained(tmp_path / "reward")
    config = rl_config("ppo", rewards={"taste": TASTE}, gae_lambda=0.0)
    ours, _ = trainer(config, model, tmp_path / "work", {"ppo.rewards.taste.model": judge})
    e = ours.score(trajectories())
    made = build_algorithm(config).advantages(e, torch.full((4,), -2.45), torch.arange(4), 0.0)
    assert e.values is not None
    assert made.returns is not None
    torch.testing.assert_close(e.values[e.loss_mask], torch.full((10,), -2.45))
    torch.testing.assert_close(made.returns, e.values)


@pytest.mark.parametrize("stored", [{}, {"mean": float("nan"), "std": 0.0}])
def test_a_reward_model_that_stores_no_scale_starts_a_critic_as_it_is(
    stored: dict[str, float], model: Input, tmp_path: Path
) -> None:
    classifier, judge = tiny_reward_model(model, tmp_path / "reward", **stored)
    ours, _ = trainer(rl_config("ppo", critic={"start": "reward"}), model, tmp_path, {"ppo.critic.start": judge})
    assert_values(ours.score(trajectories()).values, classifier)


def tiny_reward_model(model: Input, folder: Path, **stored: float) -> tuple[LlamaForSequenceClassification, Input]:
    torch.manual_seed(1)
    classifier = LlamaForSequenceClassification.from_pretrained(model.folder, num_labels=1, pad_token_id=0)
    classifier.save_pretrained(folder)
    update_json(folder / "config.json", **{f"reward_{name}": value for name, value in stored.items()})
    return classifier, local_input(folder, Kind.REWARD_MODEL)


def assert_values(
    values: torch.Tensor | None, classifier: LlamaForSequenceClassification, factor: float = 1.0, offset: float = 0.0
) -> None:
    """`values` of `trajectories` are the classifier's scores before each trained token, scaled."""
    e = trajectories()
    assert values is not None
    parts = [t.split(e.sequence_lengths.tolist()) for t in (e.input_ids, values, e.loss_mask)]
    for ids, found, mask in zip(*parts, strict=True):
        scores = classifier.score(classifier.model(ids[None]).last_hidden_state)[0, :-1, 0]
        torch.testing.assert_close(found[1:], (factor * scores + offset) * mask[1:], atol=1e-5, rtol=0)


def test_the_critic_is_kept_where_asked_for(model: Input, tmp_path: Path) -> None:
    config = rl_config("ppo", critic={"save": True})
    ours, group = trainer(config, model, tmp_path / "work")
    ours.update(with_advantages(config, ours, ours.score(trajectories())), 0)
    values = ours.score(trajectories()).values
    group.call(RLWorker.save, tmp_path / "out")
    kept = LlamaForSequenceClassification.from_pretrained(tmp_path / "out" / "critic", num_labels=1)
    assert_values(values, kept)
