"""Rewards of reward models. Models on the training ranks compute in the ranks' turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from rlhf_core.config.rewards.rewards import ModelReward
from rlhf_core.config.rl.settings import POLICY_INPUT
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input
from rlhf_core.errors import StageError
from rlhf_core.models.folders.readers import images_problem
from rlhf_core.rewards.model import RewardReader
from rlhf_core.rl.hybrid import OwnDevices, Turns
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.roles import reward_roles
from rlhf_core.types import PackedBatch


@dataclass(frozen=True, slots=True)
class RankScores:
    """Token scores (rewards.model.TokenScores) of the reward model of one role."""

    role: str
    trainer: PolicyTrainer
    turns: Turns
    samples_again: bool  # the engines may sample again with the same weights, before the policy is updated

    def __call__(self, batch: PackedBatch) -> Tensor:
        self.turns.train(keep_weights=self.samples_again)
        scores = self.trainer.reward_scores(batch, self.role)
        if self.samples_again:
            self.turns.sample()
        return scores


def read_reward_models(
    rewards: Mapping[str, ModelReward], place: str, inputs: Mapping[str, Input], tokens: int
) -> dict[str, RewardReader]:
    """Return the reader of each model reward by name. Reads only the folders of the models.

    place: the setting that contains the rewards; tokens: of the longest sequence.
    Raises StageError, naming the reward, if its model cannot compute it.
    """
    models = {}
    for name, settings in rewards.items():
        folder = inputs[f"{place}.{name}.model"].folder
        try:
            models[name] = RewardReader.of(settings, folder, inputs[POLICY_INPUT].folder, tokens)
        except StageError as error:
            raise StageError(f"{place}.{name}: {error}") from error
    return models


def image_problems(
    config: RLConfig, inputs: Mapping[str, Input], reward_models: Mapping[str, RewardReader]
) -> Iterator[str]:
    """Yield the reason for each model of the run that cannot read the images that the policy reads."""
    policy = inputs[POLICY_INPUT].folder
    for setting, (name, advice) in config.token_readers.items():
        if (problem := images_problem(inputs[name].folder, policy)) is not None:
            yield f"{setting}: {problem}: {advice}"
    for name, model in reward_models.items():
        if model.processor is None:
            place = f"{config.block}.rewards.{name}"
            problem = images_problem(inputs[f"{place}.model"].folder, policy) or (
                "the prompts have images, and it does not read the policy's tokens"
            )
            yield f"{place}: {problem}: train a reward model of the policy's base, or remove it"


def rank_scores(
    config: RLConfig, inputs: Mapping[str, Input], trainer: PolicyTrainer, turns: Turns
) -> dict[str, RankScores]:
    """Return the token scores of each model reward by name."""
    samples_again = config.settings.filtering is not None  # groups may be filtered out
    own = config.own_placements  # these models need no turn
    return {
        name: RankScores(role, trainer, OwnDevices() if role in own else turns, samples_again)
        for name, role in reward_roles(config, inputs).items()
    }
