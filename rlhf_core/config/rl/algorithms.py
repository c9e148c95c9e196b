"""Settings of the RL algorithms: one block class each, and their shared base.

The form of each loss and advantage, and its clips, are by default those of its paper. Sizes are not: the KL has the
coefficient 0, whatever the paper's, and groups and optimizers have defaults of their own.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_core.config.base import Config, since_default
from rlhf_core.config.numbers import (
    ClipHigh,
    ClipLow,
    Coefficient,
    DualClip,
    GateTemperature,
    GroupSize,
    HighRatio,
    Minibatches,
    Passes,
    PositiveShare,
    Share,
    Tokens,
    no_number,
)
from rlhf_core.config.rewards.rewards import GroupReward, ModelReward, RewardConfig, Scorer, VerifierReward
from rlhf_core.config.rl.components import CrossEntropyConfig, MismatchConfig, PolicyTeacherConfig
from rlhf_core.config.rl.critic import CriticConfig
from rlhf_core.config.rl.kl import KLConfig, LossKLConfig, SquaredKLConfig
from rlhf_core.config.rl.shaping import FilteringConfig, ShapingConfig
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.config.texts import JudgeName

Aggregation = Literal["token", "sequence", "constant"]
DivideByDeviation = Annotated[Literal[False, True, "batch"], BeforeValidator(no_number)]


def _aggregation(default: Aggregation) -> Any:
    how = "mean over the step's tokens, over completions of their means, or over completions of their sums / a constant"
    return Field(default=default, description=how)


def _divide_by_deviation(default: bool) -> Any:
    how = "divide rewards, less the mean of their group, by the deviation of the group, or `batch`: of the whole step"
    return Field(default=default, description=how)


def _kl(default: KLConfig) -> Any:
    return Field(default=default, description="KL to the reference model")


class AlgorithmConfig(Config):
    """Settings shared by all policy-gradient algorithms."""

    takes_process_rewards: ClassVar[bool] = False
    mismatch_example: ClassVar[str | None] = "{correction: truncate, low: 0.0, high: 2.0}"

    rewards: dict[JudgeName, RewardConfig] = Field(
        min_length=1, description="the training rewards, summed by their weights"
    )
    shaping: ShapingConfig = Field(default=ShapingConfig(), description="transformations of the sum before training")
    filtering: FilteringConfig | None = Field(
        default=None, description="train only on prompts with a mean score in a range; none: on all"
    )
    optimizer: OptimizerConfig = Field(description="optimizer of the policy")
    group_size: GroupSize = Field(default=1, description="completions per prompt")
    epochs: Passes = Field(default=1, description="passes over each batch of experience")
    minibatches: Minibatches = Field(default=1, description="optimizer steps per pass")
    clip_low: ClipLow = Field(default=0.2, description="the ratio of new to old probability is clipped at 1 - this")
    clip_high: ClipHigh = Field(default=0.2, description="the ratio is clipped at 1 + this")
    dual_clip: DualClip | None = Field(
        default=None, description="maximum factor of a negative advantage; none: unbounded"
    )
    aggregation: Aggregation = _aggregation("token")
    aggregation_length: Tokens | None = Field(
        default=None, description="the constant; none: `sampling.max_tokens` x turns"
    )
    mask_truncated_completions: bool = Field(
        default=False,
        description="mask truncated completions in the loss; their rewards still count in the baseline of their group",
    )
    kl: KLConfig = _kl(KLConfig())
    teacher: PolicyTeacherConfig | None = since_default(
        None, description="a model that scores each sampled token beside the rewards; none: rewards only"
    )
    cross_entropy: CrossEntropyConfig | None = since_default(
        None, description="imitation of completions with a high reward, beside the policy gradient; none: no imitation"
    )
    entropy_coefficient: Coefficient = Field(default=0.0, description="weight of the entropy bonus in the loss")
    moe_coefficient: Coefficient = Field(
        default=0.0, description="weight of a mixture-of-experts model's load-balancing loss"
    )
    mismatch: MismatchConfig | None = Field(
        default=None,
        description="correction of the mismatch of engine and trainer; none: it is only measured; with `asynchronous` "
        "set a correction, or `null`",
    )

    @model_validator(mode="after")
    def _length_is_used(self) -> AlgorithmConfig:
        if self.aggregation_length is not None and self.aggregation != "constant":
            raise ValueError(
                f"aggregation_length is set, but aggregation is {self.aggregation}; remove it, or set constant"
            )
        return self

    @model_validator(mode="after")
    def _rewards_count(self) -> AlgorithmConfig:
        if self.rewards and not any(reward.weight for reward in self.rewards.values()):
            raise ValueError("all rewards have the weight 0, so nothing would be learned; give one a weight")
        return self

    @model_validator(mode="after")
    def _groups_are_large_enough(self) -> AlgorithmConfig:
        for name, reward in self.rewards.items():
            if isinstance(reward, GroupReward) and self.group_size < reward.least_group:
                raise ValueError(
                    f"rewards.{name} compares the completions of a prompt, but group_size is {self.group_size}: set "
                    f"{reward.least_group} or more"
                )
        return self

    @model_validator(mode="after")
    def _steps_are_used(self) -> AlgorithmConfig:
        for name, reward in self.rewards.items():
            if reward.gives_steps and not self.takes_process_rewards:
                raise ValueError(f"rewards.{name} rewards single steps, which this algorithm cannot use")
        return self

    @model_validator(mode="after")
    def _filtering_has_scores(self) -> AlgorithmConfig:
        if self.filtering is None:
            return self
        if self.group_size < 2:
            raise ValueError("filtering compares the completions of one prompt, but group_size is 1; raise it")
        scorers = self.scorers
        if self.filtering.score is not None and self.filtering.score not in scorers:
            raise ValueError(
                f"filtering.score is {self.filtering.score}; of `rewards`, those that may give scores: "
                f"{', '.join(scorers) or 'none'}"
            )
        sure = [name for name, reward in scorers.items() if reward.gives_scores]
        if self.filtering.score is None and len(sure) > 1:
            raise ValueError(f"filtering looks at one score, and {', '.join(sure)} give one each: set filtering.score")
        if not scorers:
            rewards = ", ".join(f"{name} ({reward.type})" for name, reward in self.rewards.items()) or "none"
            raise ValueError(
                "filtering needs a reward that gives scores from 0 to 1, such as a verifier, or an environment with a "
                f"`threshold` or `scored`, and no other does: of `rewards` there is {rewards}; add one (with weight 0 "
                "it is not trained on), or set filtering: null"
            )
        return self

    @model_validator(mode="after")
    def _filtering_keeps_something(self) -> AlgorithmConfig:
        if self.filtering is None:
            return self
        scoring = [self.filtering.score] if self.filtering.score is not None else list(self.scorers)
        reward = self.scorers[scoring[0]] if len(scoring) == 1 else None
        if not isinstance(reward, VerifierReward) or not reward.verifier.two_valued:
            return self
        means = [right / self.group_size for right in range(self.group_size + 1)]
        if not any(self.filtering.low < mean < self.filtering.high for mean in means):
            raise ValueError(
                f"filtering keeps mean scores between low={self.filtering.low:g} and high={self.filtering.high:g}, but "
                f"those of group_size={self.group_size} completions, each right or wrong, are multiples of "
                f"1/{self.group_size}, of which none lies between: raise group_size, or the range"
            )
        return self

    @property
    def critic_settings(self) -> CriticConfig | None:
        """Settings of the critic: an algorithm whose settings declare a CriticConfig has one."""
        return next((value for _, value in self.used_settings() if isinstance(value, CriticConfig)), None)

    @property
    def uses_reference(self) -> bool:
        """True if a reference is loaded and run: not for a coefficient of 0, which stays 0 also where it adapts."""
        return self.kl.coefficient > 0

    @property
    def model_rewards(self) -> dict[str, ModelReward]:
        """The subset of `rewards` computed by reward models."""
        return {name: reward for name, reward in self.rewards.items() if isinstance(reward, ModelReward)}

    @property
    def scorers(self) -> dict[str, Scorer]:
        """The subset of `rewards` that may return scores, which `filtering` uses."""
        return {name: r for name, r in self.rewards.items() if isinstance(r, Scorer) and r.may_give_scores}

    @property
    def driver_rewards(self) -> dict[str, RewardConfig]:
        """The subset of `rewards` computed by the driver: all but reward models, which have workers."""
        return {name: reward for name, reward in self.rewards.items() if not isinstance(reward, ModelReward)}


class PPOConfig(AlgorithmConfig):
    """arXiv:1707.06347 as used in arXiv:2203.02155: critic, GAE, per-token KL to the SFT model in the reward."""

    takes_process_rewards: ClassVar[bool] = True

    critic: CriticConfig = Field(description="the value model")
    gamma: Share = Field(default=1.0, description="discount of a later reward, per token")
    gae_lambda: Share = Field(default=0.95, description="0: one-step advantages, 1: whole returns")


class ReinforcePlusPlusConfig(AlgorithmConfig):
    """arXiv:2501.03262: returns of the per-token KL reward and the outcome, whitened over the batch, no critic."""

    takes_process_rewards: ClassVar[bool] = True

    gamma: Share = Field(default=1.0, description="discount of a later reward, per token")


class OnPolicyDistillationConfig(AlgorithmConfig):
    """arXiv:2306.13649 by policy gradient: the student samples, and the teacher's log-probs of the sampled tokens are
    the signal. Rewards, if there are any, are compared within the completions of one prompt.
    """

    rewards: dict[JudgeName, RewardConfig] = Field(
        default={}, description="rewards beside the teacher, summed by their weights; none: the teacher only"
    )
    teacher: PolicyTeacherConfig = Field(description="the model that scores each sampled token")

    @model_validator(mode="after")
    def _rewards_compare(self) -> OnPolicyDistillationConfig:
        if self.rewards and self.group_size < 2:
            raise ValueError(
                "group_size is 1, but `rewards` compare the completions of a prompt: set 2 or more, or remove them"
            )
        if self.shaping != ShapingConfig() and self.group_size < 2:
            raise ValueError(
                "group_size is 1, but `shaping` changes rewards, which are compared within a group: set 2 or more, or "
                "remove it"
            )
        if self.cross_entropy is not None and not self.rewards:
            raise ValueError("cross_entropy imitates completions with a high reward, but there are no `rewards`")
        return self


class GroupConfig(AlgorithmConfig):
    """Settings shared by algorithms that compare the completions of one prompt with each other."""

    group_size: GroupSize = Field(default=8, description="completions per prompt, at least 2")

    @model_validator(mode="after")
    def _groups_compare(self) -> GroupConfig:
        if self.group_size < 2:
            raise ValueError("group_size is 1: the completions of a prompt are compared, so there must be 2 or more")
        return self


class ReinforcePlusPlusBaselineConfig(GroupConfig):
    """arXiv:2501.03262, the variant with the group's mean reward as baseline, whitened over the batch."""

    kl: SquaredKLConfig = _kl(SquaredKLConfig())


class RLOOConfig(GroupConfig):
    """arXiv:2402.14740: each completion compared with the mean of the others; the KL is part of the reward."""

    kl_per_token: bool = Field(
        default=False,
        description="false: a completion's KL enters its reward before the baseline (the paper); true: each token "
        "loses the KL from it on, after the baseline (OpenRLHF)",
    )
    aggregation: Aggregation = _aggregation("constant")


class GRPOConfig(GroupConfig):
    """arXiv:2402.03300: rewards normalised within the completions of one prompt, no critic."""

    takes_process_rewards: ClassVar[bool] = True

    kl: LossKLConfig = _kl(LossKLConfig())
    aggregation: Aggregation = _aggregation("sequence")
    divide_by_deviation: DivideByDeviation = _divide_by_deviation(True)


class DrGRPOConfig(GRPOConfig):
    """arXiv:2503.20783: GRPO without division by the group's deviation and by the length, its two biases."""

    aggregation: Aggregation = _aggregation("constant")
    divide_by_deviation: DivideByDeviation = _divide_by_deviation(False)


class DAPOConfig(GRPOConfig):
    """arXiv:2503.14476: GRPO with a higher upper clip, a mean over tokens, dynamic filtering; no KL.

    The paper's overlong penalty is `shaping.overlong`: set its buffer.
    """

    filtering: FilteringConfig | None = Field(
        default=FilteringConfig(), description="train only on prompts with a mean score in a range; none: on all"
    )
    clip_high: ClipHigh = Field(default=0.28, description="the ratio is clipped at 1 + this")
    aggregation: Aggregation = _aggregation("token")


class GDPOConfig(GRPOConfig):
    """arXiv:2601.05242: each of several rewards normalised within the completions of one prompt, then their weighted
    sum over the step: a reward of small spread counts as much as one of large."""

    takes_process_rewards: ClassVar[bool] = False

    @model_validator(mode="after")
    def _rewards_stay_apart(self) -> GDPOConfig:
        if self.shaping != ShapingConfig():
            raise ValueError("shaping changes the sum of rewards, and gdpo normalises each before the sum: remove it")
        if self.kl.place == "reward":
            raise ValueError("kl.place is reward, but gdpo normalises each reward by itself: use loss")
        return self


class CompletionRatioConfig(GRPOConfig):
    """Settings shared by algorithms with one ratio per completion."""

    takes_process_rewards: ClassVar[bool] = False
    mismatch_example: ClassVar[str | None] = "{correction: sequence_filter, low: 0.5, high: 2.0}"

    @model_validator(mode="after")
    def _completions_stay_whole(self) -> CompletionRatioConfig:
        if self.mismatch is not None and not self.mismatch.judges_completions:
            raise ValueError(
                f"mismatch.correction is {self.mismatch.correction}, which judges single tokens, but this algorithm "
                "judges whole completions: use sequence_filter, or mismatch.ratio_of: sequence or geometric_mean"
            )
        return self


class GSPOConfig(CompletionRatioConfig):
    """arXiv:2507.18071: one ratio per completion, the geometric mean of its tokens' ratios."""

    clip_low: ClipLow = Field(default=3e-4, description="the ratio of new to old probability is clipped at 1 - this")
    clip_high: ClipHigh = Field(default=4e-4, description="the ratio is clipped at 1 + this")


class GMPOConfig(CompletionRatioConfig):
    """arXiv:2507.20673: one ratio per completion, the geometric mean of its tokens' ratios after their clips."""

    clip_low: ClipHigh = Field(
        default=0.4, description="the logarithm of the ratio of new to old probability is clipped at -this"
    )
    clip_high: ClipHigh = Field(default=0.4, description="the logarithm of the ratio is clipped at this")
    dual_clip: None = Field(default=None, description="not part of this loss")


class CISPOConfig(GRPOConfig):
    """arXiv:2506.13585: the ratio is a clipped weight without gradient, so that no token loses its gradient."""

    takes_process_rewards: ClassVar[bool] = False

    clip_low: ClipLow = Field(default=1.0, description="the weight is at least 1 - this; 1: no lower bound")
    clip_high: ClipHigh = Field(default=4.0, description="the weight is at most 1 + this")
    dual_clip: None = Field(default=None, description="not part of this loss")
    aggregation: Aggregation = _aggregation("token")


class SAPOConfig(GRPOConfig):
    """arXiv:2511.20347: a sigmoid of the ratio in place of its clips, so that a token loses its gradient gradually."""

    takes_process_rewards: ClassVar[bool] = False

    # The base declares numbers, which this loss does not read.
    clip_low: None = Field(default=None, description="not part of this loss")  # type: ignore[assignment]
    clip_high: None = Field(default=None, description="not part of this loss")  # type: ignore[assignment]
    dual_clip: None = Field(default=None, description="not part of this loss")
    temperature_positive: GateTemperature = Field(
        default=1.0, description="of the sigmoid at tokens with a positive advantage; higher: the gradient ends sooner"
    )
    temperature_negative: GateTemperature = Field(
        default=1.05, description="of the sigmoid at the other tokens, which the paper holds closer to the old policy"
    )


class DPPOConfig(GRPOConfig):
    """arXiv:2602.04879 with the binary total variation: a token whose probability has moved too far from the engine's
    is masked, whatever its ratio."""

    takes_process_rewards: ClassVar[bool] = False
    mismatch_example: ClassVar[str | None] = None  # the ratio is to the engine's probability: it corrects for it

    clip_low: PositiveShare = Field(
        default=0.15, description="a token is masked whose advantage is negative and whose probability is lower by more"
    )
    clip_high: PositiveShare = Field(
        default=0.15,
        description="a token is masked whose advantage is positive and whose probability is higher by more",
    )
    dual_clip: None = Field(default=None, description="not part of this loss")
    max_ratio: HighRatio = Field(default=20.0, description="the ratio counts at most this much in the gradient")
    mismatch: None = Field(
        default=None, description="not part of this loss, whose ratio is to the engine's probability"
    )
