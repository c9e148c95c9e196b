"""The configured Prefect server, and our words for one that is not there or lacks a deployment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from rlhf_core.errors import StackError


def prefect_api() -> str:
    """The address of its API. Raises StackError if none is configured."""
    api = get_current_settings().api.url
    if not api:
        raise StackError("no Prefect server is configured: run `alignment up`, or set PREFECT_API_URL")
    return api


@contextmanager
def asking_for(deployment: str, api: str) -> Iterator[None]:
    """Raises StackError where the server at `api` does not answer or has no such deployment."""
    try:
        yield
    except ObjectNotFound as error:
        raise StackError(f"the Prefect server at {api} has no deployment {deployment}: run `alignment up`") from error
    except httpx.TransportError as error:
        raise StackError(f"no Prefect server answers at {api} ({error}): run `alignment up`") from error
