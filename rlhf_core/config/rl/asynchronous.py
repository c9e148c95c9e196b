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
        description="maximum number of steps between the weights that sampled a completion's oldest token and those "
        "trained on it; 0: every step waits for its own rollouts",
    )
    in_flight: BatchSize | None = Field(
        default=None,
        description="maximum number of prompts whose completions are being sampled, scored or wait for training; "
        "none: (max_lag + 1) x prompts_per_step",
    )
    publish: Literal["in_flight", "between_replies"] = Field(
        default="in_flight",
        description="publish new weights to the engines while replies are being sampled, which continue with them, or "
        "when all replies in progress are complete, before others begin",
    )
    too_old: Literal["resample", "drop"] = Field(
        default="resample", description="resample or drop a prompt whose completions exceed max_lag"
    )

    @model_validator(mode="after")
    def _others_count(self) -> AsynchronousConfig:
        fields = type(self).model_fields.items()
        others = [name for name, field in fields if name != "max_lag" and getattr(self, name) != field.default]
        if not self.max_lag and others:
            raise ValueError(
                f"{others[0]} has no effect with max_lag: 0, where every step waits for its own rollouts; remove "
                "it, or raise max_lag"
            )
        return self
