"""Settings of the watchdog."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import Config


class WatchdogConfig(Config):
    """A phase of a job - a step, a publish, a validation, a part of rows - has hung once it takes much longer than all
    earlier ones of its name.
    """

    factor: float = Field(
        default=10.0, ge=2, le=1000, description="of the longest earlier phase of that name: the deadline"
    )
    minutes: float = Field(default=30.0, gt=0, le=10_000, description="least deadline")
    restarts: int = Field(
        default=2,
        ge=0,
        le=1000,
        description="restarts from one checkpoint; the next time that it hangs, the stage fails",
    )
