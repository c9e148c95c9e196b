"""The models of an RL run as data: initial weights, engine and optimizer of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rlhf_core.artifacts.manifest import ArtifactRef, Kind
from rlhf_core.config.engines.placement import ModelPlacement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.rl.groups import workers_of
from rlhf_core.config.rl.settings import POLICY_INPUT
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.trained import LoraConfig, OptimizerConfig
from rlhf_core.contract import Input
from rlhf_core.errors import StageError
from rlhf_core.models.folders.folder import ADAPTER, read_config, sampled_otherwise
from rlhf_core.models.folders.readers import Scale, images_problem, reader_problem, same_tokens, stored_scale

POLICY, REFERENCE, TEACHER, CRITIC = "policy", "reference", "teacher", "critic"


@dataclass(frozen=True, slots=True)
class ValueScale:
    """Affine map from the raw scores of a critic's initial model to the critic's first values."""

    factor: float = 1.0
    offset: float = 0.0  # added after scaling


@dataclass(frozen=True, slots=True)
class Role:
    """One model, on the training ranks or on separate ones. A model without an optimizer is frozen."""

    name: str  # policy, reference, teacher, critic, or `reward:NAME` of the reward NAME
    start: ArtifactRef  # its initial weights
    head: Literal["causal", "scalar"]
    engine: EngineConfig
    optimizer: OptimizerConfig | None = None
    total_steps: int = 0  # optimizer steps of the whole schedule
    lora: LoraConfig | None = None
    dropout: bool = False  # during updates
    value_scale: ValueScale = ValueScale()  # of a critic
    adapter_off: bool = False  # the policy without its adapter, in place of a copy
    shares_base: bool = False  # an adapter on the frozen weights of the policy's base
    offloaded: bool = False  # weights are in host memory, except while it computes
    placement: ModelPlacement | None = None  # of separate workers; None: on the policy's

    @property
    def workers(self) -> str:
        """The name of its workers, which other roles may share."""
        return workers_of(self.name, self.placement)


def roles(config: RLConfig, inputs: Mapping[str, Input]) -> tuple[Role, ...]:
    """Return the models that the run needs, and no others: without a KL no reference, with GRPO no critic."""
    settings, critic = config.settings, config.settings.critic_settings
    start = inputs["model"].manifest.ref
    updates = settings.epochs * settings.minibatches
    warmup_steps = critic.warmup_steps if critic is not None else 0
    needed = [
        Role(
            POLICY, start, "causal", config.engine_of(POLICY), settings.optimizer,
            total_steps=(config.steps - warmup_steps) * updates, lora=config.lora, dropout=config.dropout,
        )
    ]  # fmt: skip
    if settings.uses_reference:
        reference = inputs[config.reference_input].manifest.ref
        needed.append(
            Role(
                REFERENCE, reference, "causal", config.engine_of(REFERENCE),
                adapter_off=config.reference_is_base, offloaded=settings.kl.offload,
                placement=config.own_placements.get(REFERENCE),
            )
        )  # fmt: skip
    if settings.teacher is not None:
        needed.append(
            Role(
                TEACHER, inputs[config.teacher_input].manifest.ref, "causal", config.engine_of(TEACHER),
                offloaded=settings.teacher.offload, placement=config.own_placements.get(TEACHER),
            )
        )  # fmt: skip
    if critic is not None:
        critic_start = inputs[config.critic_input].manifest.ref
        needed.append(
            Role(
                CRITIC, critic_start, "scalar", config.engine_of(CRITIC), critic.optimizer,
                total_steps=config.steps * updates, lora=critic.lora, dropout=config.dropout,
                value_scale=_value_scale(config, inputs), placement=config.own_placements.get(CRITIC),
                shares_base=critic_start == start and critic.lora is not None and _can_share_base(config, CRITIC),
            )
        )  # fmt: skip
    for reward, name in reward_roles(config, inputs).items():
        if name == reward_role(reward):
            reward_model, placement = inputs[config.reward_input(reward)], config.own_placements.get(name)
            needed.append(
                Role(
                    name, reward_model.manifest.ref, "scalar", config.engine_of(name), placement=placement,
                    offloaded=(offloaded := settings.model_rewards[reward].offload),
                    shares_base=(
                        _is_adapter_of(reward_model, start)
                        and placement is None
                        and not offloaded
                        and _can_share_base(config, name)
                    ),
                )
            )  # fmt: skip
    return tuple(needed)


def _value_scale(config: RLConfig, inputs: Mapping[str, Input]) -> ValueScale:
    """Return the scale of a critic's first values.

    A critic that starts from a reward model starts with the rewards of this model: normalised if they are, weighted
    and summed. Values on the raw scale would bias the first advantages, by the mean of the raw scores at the end of a
    completion.

    Scores of a reward model that no reward uses are normalised by its stored scale; so are, with the sign of the
    weight, scores under `shaping.normalize`, which scales all rewards to mean 0 and deviation 1. Non-linear shaping
    (overlong, truncation, clip) is left to the critic to learn. A KL in the reward is 0 at first.
    """
    start, settings = inputs[config.critic_input], config.settings
    if start.manifest.kind is not Kind.REWARD_MODEL:
        return ValueScale()
    rewards = [
        reward
        for name, reward in settings.model_rewards.items()
        if reward.weight and inputs[config.reward_input(name)].manifest.ref == start.manifest.ref
    ]
    stored = stored_scale(read_config(start.folder)) or Scale()
    if not rewards or settings.shaping.normalize:
        sign = -1 if sum(reward.weight for reward in rewards) < 0 else 1
        return ValueScale(sign / stored.std, -sign * stored.mean / stored.std)
    scales = [(reward.weight, stored if reward.normalize else Scale()) for reward in rewards]
    return ValueScale(
        math.fsum(weight / scale.std for weight, scale in scales),
        -math.fsum(weight * scale.mean / scale.std for weight, scale in scales),
    )


def placed_apart(roles: Iterable[Role]) -> dict[str, tuple[Role, ...]]:
    """Return the roles of each group of workers apart from the policy's, by its name."""
    groups: dict[str, tuple[Role, ...]] = {}
    for role in roles:
        if role.placement is not None:
            groups[role.workers] = (*groups.get(role.workers, ()), role)
    return groups


def _can_share_base(config: RLConfig, role: str) -> bool:
    """Return whether policy and `role`, if both are adapters of one model, can share its weights in memory."""
    engines = config.engine_of(POLICY), config.engine_of(role)
    same_dtype = engines[0].dtype == engines[1].dtype
    # ZeRO 3 partitions each weight for one engine, which gathers and frees it as its own model runs.
    packed = config.quantised is not None  # while the others have whole weights
    return config.lora is not None and not packed and same_dtype and all(engine.sharding < 3 for engine in engines)


def _is_adapter_of(reward_model: Input, base: ArtifactRef) -> bool:
    """Return whether a reward model was trained as an adapter of `base`, and is stored as an adapter too."""
    return reward_model.manifest.parents.get("model") == base and (reward_model.folder / ADAPTER).is_dir()


def reward_role(reward: str) -> str:
    """Return the role of the model of a reward."""
    return f"reward:{reward}"


def reward_roles(config: RLConfig, inputs: Mapping[str, Input]) -> dict[str, str]:
    """Return the role of each reward by name. Rewards of the same model, engine settings and placement share a role."""
    role_by_model: dict[tuple[ArtifactRef, EngineConfig, ModelPlacement | None, bool], str] = {}
    role_by_reward = {}
    for reward in config.settings.model_rewards:
        own_role = reward_role(reward)
        ref = inputs[config.reward_input(reward)].manifest.ref
        offload = config.settings.model_rewards[reward].offload
        model = (ref, config.engine_of(own_role), config.own_placements.get(own_role), offload)
        role_by_reward[reward] = role_by_model.setdefault(model, own_role)
    return role_by_reward


def require_same_tokens(
    readers: Mapping[str, tuple[str, str]],
    inputs: Mapping[str, Input],
    bound: str,
    tokens: int,
    *,
    images: bool = False,
) -> None:
    """Raise StageError if a model that reads the policy's tokens has another tokenizer, too short a context, or, with
    `images`, cannot read the policy's.

    readers: as StageConfig.token_readers; bound: the setting that limits a sequence to `tokens`.
    """
    policy = inputs[POLICY_INPUT].folder
    for setting, (name, advice) in readers.items():
        folder = inputs[name].folder
        reads_tokens = same_tokens(folder, policy)
        problem = reader_problem(read_config(folder), bound, tokens, reads_tokens=reads_tokens)
        if problem is None and images:
            problem = images_problem(folder, policy)
        if problem is not None:
            where = setting if name == setting else f"{setting}: the input {name}"
            raise StageError(f"{where}: {problem}: {advice}")


def require_same_positions(config: RLConfig, inputs: Mapping[str, Input]) -> None:
    """Raise StageError if engines and trainer would compute the policy's positions differently."""
    tokens = config.rollout.max_length
    if problem := sampled_otherwise(read_config(inputs["model"].folder), tokens):
        raise StageError(f"{config.block}.rollout.max_length={tokens} is too long for this model: {problem}")
