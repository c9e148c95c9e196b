"""Settings of notifications."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlhf_core.config.base import Config
from rlhf_core.config.texts import Label

Event = Literal["failed", "refused", "promoted", "stuck", "over_budget", "waiting_for_approval"]


def _no_url(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):  # what may be the URL itself is not repeated
        raise ValueError("this is the name of an environment variable: set that to the URL, which is a secret")
    return name


class NotifyConfig(Config):
    """A webhook, whose URL is a secret, and never in a recipe."""

    webhook: Annotated[str, AfterValidator(_no_url)] = Field(
        default="ALIGNMENT_WEBHOOK", description="variable with its URL, where the flow runs; unset: nothing is sent"
    )
    webhook_block: Label | None = Field(
        default=None, description="name of a Prefect Secret block with its URL, in place of the variable"
    )
    form: Literal["json", "slack"] = Field(default="json", description="of the message")
    on: tuple[Event, ...] = Field(
        default=("failed", "refused", "promoted", "stuck", "over_budget", "waiting_for_approval"),
        description="events that are sent",
    )
