"""Streams of server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from aiohttp import web

from rlhf_core.environments.agents.api.errors import RequestError
from rlhf_core.environments.agents.program import CallError


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Format an event. name: its type; none: it has data alone."""
    kind = "" if name is None else f"event: {name}\n"
    return f"{kind}data: {json.dumps(data)}\n\n".encode()


async def stream(
    request: web.Request, events: AsyncGenerator[bytes, None], failed: Callable[[RequestError], bytes]
) -> web.StreamResponse:
    """Send the events; what fails before the first one is raised before anything is sent.

    failed: the event of a failure after it.
    """
    async with aclosing(events) as sent:
        first = await anext(sent)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(first)
        try:
            async for each in sent:
                await response.write(each)
        except CallError as error:
            await response.write(failed(RequestError.of(error)))
    await response.write_eof()
    return response
