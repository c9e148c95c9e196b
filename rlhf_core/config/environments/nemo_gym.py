"""Settings of NeMo Gym resource servers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rlhf_core.config.base import operational
from rlhf_core.config.numbers import Attempts, Requests, Seconds
from rlhf_core.config.servers import ServerConfig
from rlhf_core.errors import RecipeError

# Paths of the server itself: a policy that calls these would set up or reward its own episode.
_RESERVED = ("seed_session", "verify", "aggregate_metrics", "mcp")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")  # a segment of a URL's path


class ResourceServers(ServerConfig):
    """One resource server, or several equal ones: each episode has its session on one of them."""

    timeout_seconds: Seconds = Field(
        default=60.0, description="timeout of a request; one that timed out is not retried"
    )
    attempts: Attempts = operational(
        5,
        description="maximum attempts of a request that had no effect: no connection, or status 429 or 503; all "
        "others are sent once",
    )
    requests_per_server: Requests = operational(64, description="maximum number of concurrent requests to a server")


def check_tools(row: Mapping[str, Any], *, can_call: bool) -> None:
    """Raise RecipeError if the row has tools that cannot be called at a resource server."""
    tools = row.get("tools") or ()
    if tools and not can_call:
        raise RecipeError("the row has tools: set the environment's `parser` to how the model writes calls")
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if name in _RESERVED:
            raise RecipeError(f"the row has a tool `{name}`, a name that the resource server reserves: rename the tool")
        if not _TOOL_NAME.fullmatch(name):
            raise RecipeError(f"the row's tool name {name[:80]!r} is invalid in a URL: use letters, digits and `_.-`")
        if names.count(name) > 1:
            raise RecipeError(f"the row has two tools `{name}`: rename one of them")
