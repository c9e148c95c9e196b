"""The configured Prefect server, and messages for a missing server or deployment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError

import httpx
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from pydantic import ValidationError

from rlhf_core.errors import StackError
from rlhf_core.system.notes import printed_after


def prefect_api() -> str:
    """Return the address of its API. Raises StackError if none is configured."""
    api = get_current_settings().api.url
    if not api:
        raise StackError("no Prefect server is configured: run `alignment up`, or set PREFECT_API_URL")
    return api


# Errors of a response that is not Prefect's.
_NOT_PREFECTS = (httpx.HTTPError, httpx.InvalidURL, JSONDecodeError, UnicodeDecodeError, ValidationError)
_SILENT_SECONDS = 5.0  # Prefect's client tries again for a minute, without a word


@contextmanager
def asking_for(deployment: str, api: str) -> Iterator[None]:
    """Raise StackError if the server at `api` does not respond as Prefect does, or has no such deployment."""
    try:
        with answers_of(api), printed_after(_SILENT_SECONDS, f"waiting for the Prefect server at {api}"):
            yield
    except ObjectNotFound as error:
        raise StackError(f"the Prefect server at {api} has no deployment {deployment}: run `alignment up`") from error


@contextmanager
def answers_of(api: str) -> Iterator[None]:
    """Raise StackError if the server at `api` does not respond as Prefect does."""
    try:
        yield
    except httpx.TransportError as error:
        raise StackError(f"no Prefect server answers at {api} ({error}): run `alignment up`") from error
    except httpx.HTTPStatusError as error:
        raise StackError(_refusal(api, error.response.status_code)) from error
    except _NOT_PREFECTS as error:
        raise StackError(f"what answers at {api} is not a Prefect server: correct PREFECT_API_URL") from error


def _refusal(api: str, status: int) -> str:
    if status in (401, 403):
        return (
            f"the Prefect server at {api} refuses the credentials (status {status}): correct PREFECT_API_AUTH_STRING "
            "or PREFECT_API_KEY"
        )
    return f"the Prefect server at {api} answers with status {status}: see its log, or correct PREFECT_API_URL"
