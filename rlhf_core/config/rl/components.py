"""Settings of optional terms of an RL algorithm's loss: a teacher, imitation, a correction."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Reads, operational, since_default
from rlhf_core.config.engines.placement import ModelPlacement, require_others
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.numbers import HighRatio, LowRatio, PositiveCoefficient, Reward
from rlhf_core.config.servers import HintTemplate


class MismatchConfig(Config):
    """Corrects the mismatch between the token probabilities of engine and trainer; w = trainer's / engine's."""

    correction: Literal["truncate", "mask", "token_filter", "sequence_filter"] = Field(
        description="truncate: weight by w clamped to [low, high]; mask: drop what has w outside, and weight others by "
        "w; token_filter: the same by token (IcePop); sequence_filter: drop completions whose geometric mean of w is "
        "outside, and weight tokens of others by min(w, high)"
    )
    ratio_of: Literal["token", "sequence", "geometric_mean"] = since_default(
        "token",
        description="truncate and mask: w of each token, of the completion (the product over its tokens), or the "
        "geometric mean over them",
    )
    low: LowRatio = Field(description="lowest w; usual values are 0 with truncate and 0.5 with token_filter")
    high: HighRatio = Field(description="highest w; usual values are 2 with truncate and 5 with token_filter")

    @property
    def judges_completions(self) -> bool:
        """True if all tokens of a completion are kept or dropped together."""
        return self.correction == "sequence_filter" or self.ratio_of != "token"

    @model_validator(mode="after")
    def _ratio_is_used(self) -> MismatchConfig:
        if self.ratio_of != "token" and self.correction not in ("truncate", "mask"):
            raise ValueError(f"ratio_of has no effect with {self.correction}: remove it, or use truncate or mask")
        return self

    @model_validator(mode="after")
    def _low_is_below_high(self) -> MismatchConfig:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}: low must be the smaller")
        return self


class PolicyTeacherConfig(Config):
    """A frozen model that scores each sampled token: coefficient x (log p_teacher - log p), an estimate of minus the
    reverse KL, is added to the token's advantage, without discount (arXiv:2306.13649).

    With `hint` it may be the model that the policy starts from: on-policy self-distillation, arXiv:2601.18734.
    """

    model: Annotated[str, Reads("model")] = Field(description="stage of the teacher model")
    hint: HintTemplate | None = Field(
        default=None,
        description="text for the teacher only, appended to the last message of the user: Jinja with `prompt`, "
        "`messages` and `row`, such as ` (The answer is {{ row.answer }}.)`; none: it reads the policy's prompt",
    )
    coefficient: PositiveCoefficient = Field(default=1.0, description="weight of the teacher's term in the advantage")
    engine: EngineConfig | None = Field(
        default=None, description="engine settings of the teacher; none: those of the policy"
    )
    offload: bool = operational(
        False, description="keep the teacher's weights in host memory, except while it computes"
    )
    placement: ModelPlacement | None = operational(
        None, description="resources of the teacher's own workers; none: it runs on the policy's"
    )

    @model_validator(mode="after")
    def _offload_frees_something(self) -> PolicyTeacherConfig:
        require_others(self.offload, self.placement, "teacher")
        return self


class CrossEntropyConfig(Config):
    """Imitation of the policy's own good completions: the cross-entropy of their tokens as a loss term."""

    coefficient: PositiveCoefficient = Field(description="weight of the cross-entropy, averaged by `aggregation`")
    least_reward: Reward = Field(description="completions with at least this reward, after shaping, are imitated")
