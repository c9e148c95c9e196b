"""Settings of sampling beside training: the maximum lag, and the treatment of rollouts beyond it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Config
from rlhf_core.config.numbers import BatchSize, Lag


class AsynchronousConfig(Config):
    """Prompts are answered while the policy trains on earlier answers."""

    max_lag: Lag = Field(
        default=1,
        description="steps by which the oldest token of a completion may be behind the weights that are trained on it; "
        "0: every step waits for its own rollouts",
    )
    in_flight: BatchSize | None = Field(
        default=None,
        description="prompts at most whose completions are sampled, judged or wait to be trained on; none: "
        "(max_lag + 1) x prompts_per_step",
    )
    publish: Literal["in_flight", "between_replies"] = Field(
        default="in_flight",
        description="new weights reach the engines while replies are sampled, which continue with them, or once all "
        "replies that were begun are whole, before others begin",
    )
    too_old: Literal["resample", "drop"] = Field(
        default="resample",
        description="a prompt whose completions are further behind than max_lag is answered again, or left out",
    )

    @model_validator(mode="after")
    def _others_count(self) -> AsynchronousConfig:
        fields = type(self).model_fields.items()
        others = [name for name, field in fields if name != "max_lag" and getattr(self, name) != field.default]
        if not self.max_lag and others:
            raise ValueError(
                f"{others[0]} has no effect with max_lag: 0, where every step waits for its own rollouts; leave it "
                "out, or raise max_lag"
            )
        return self
