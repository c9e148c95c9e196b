"""Names of the inputs of an RL stage that its models, beside the policy, start from."""

from __future__ import annotations

from rlhf_core.config.critic import POLICY_START
from rlhf_core.config.rl import RLConfig

POLICY_INPUT = "model"


def reward_input(config: RLConfig, reward: str) -> str:
    """Of the model of a reward."""
    return f"{config.block}.rewards.{reward}.model"


def reference_input(config: RLConfig) -> str:
    """Of what the reference starts from."""
    return POLICY_INPUT if config.settings.kl.reference is None else f"{config.block}.kl.reference"


def teacher_input(config: RLConfig) -> str:
    """Of what the teacher starts from."""
    return f"{config.block}.teacher.model"


def critic_input(config: RLConfig) -> str:
    """Of what the critic starts from."""
    critic = config.settings.critic_settings
    assert critic is not None
    if critic.start is None:
        # By name, not as written: a stage key knows no order of the rewards.
        return min((reward_input(config, reward) for reward in config.settings.model_rewards), default=POLICY_INPUT)
    return POLICY_INPUT if critic.start == POLICY_START else f"{config.block}.critic.start"


def token_readers(config: RLConfig) -> dict[str, tuple[str, str]]:
    """The models, beside the policy and the rewards, that read the policy's tokens: the setting that chooses each, its
    input, and what to do where it cannot read them."""
    readers = {}
    if config.settings.uses_reference:
        readers["kl.reference"] = reference_input(config), "name another model, or leave it out"
    if config.settings.teacher is not None:
        readers["teacher.model"] = teacher_input(config), "name another model"
    if config.settings.critic_settings is not None:
        readers["critic.start"] = critic_input(config), "set critic.start: policy"
    return {f"{config.block}.{setting}": reader for setting, reader in readers.items() if reader[0] != POLICY_INPUT}
