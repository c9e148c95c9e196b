"""A reward from a server: sends completions as JSON and receives rewards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from rlhf_core.config.rewards import HTTPReward, check_url
from rlhf_core.contract import StageContext
from rlhf_core.errors import RewardError
from rlhf_core.rewards.base import RewardResult, checked_result, tolerated

_RESPONSE_KEYS = frozenset({"rewards", "scores", "extra"})
_MAX_QUOTED = 500  # characters of a response in an error message
_MAX_PAUSE = 10.0  # seconds between two attempts


class RewardServer:
    """POSTs {"completions", "prompts", "rows"}, each a list. The response is {"rewards": […]}, optionally with
    {"scores": […], "extra": {name: […]}}, where every list has one entry per completion.

    Scoring has no side effects, so a request is retried if the connection fails or the status is 429 or 5xx. Any other
    failure, such as a timeout, is a RewardError at once.
    """

    @classmethod
    def of(cls, config: HTTPReward, context: StageContext) -> RewardServer:
        return cls(config)

    def __init__(self, config: HTTPReward) -> None:
        """Raises RewardError if an environment variable that the config names is not set or not valid."""
        self._config = config
        self._url = config.url or _url(config.url_variable)
        self._name = f"reward server {config.url or f'of {config.url_variable}'}"
        self._client = httpx.Client(
            timeout=config.timeout_seconds, headers=_header(config.header_variable) if config.header_variable else None
        )

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        values: list[Any] = []
        share = self._config.tolerated_failures
        for start in range(0, len(completions), self._config.batch_size):
            part = slice(start, start + self._config.batch_size)
            batch = {"completions": list(completions[part]), "prompts": list(prompts[part])}
            request = {**batch, "rows": [dict(row) for row in rows[part]]}
            values += tolerated(share, len(batch["completions"]), self._judged, request)
        return checked_result(values, len(completions), self._name, share)

    def close(self) -> None:
        self._client.close()

    def _judged(self, request: Mapping[str, Any]) -> list[Any]:
        return self._values(self._answer(request), len(request["completions"]))

    def _answer(self, request: Mapping[str, Any]) -> httpx.Response:
        retrying = Retrying(
            stop=stop_after_attempt(self._config.attempts),
            wait=wait_random_exponential(multiplier=0.2, max=_MAX_PAUSE),
            retry=retry_if_exception(_is_transient),
            reraise=True,
        )
        try:
            return retrying(self._post, request)
        except httpx.HTTPStatusError as error:
            status, body = error.response.status_code, error.response.text[:_MAX_QUOTED]
            # Without `from error`: its text contains the URL, which may be secret.
            raise RewardError(f"{self._name} answered with status {status}: {body}") from None
        except httpx.TimeoutException as error:
            limit = self._config.timeout_seconds
            raise RewardError(f"{self._name} did not answer within {limit:g} s ({type(error).__name__})") from error
        except httpx.RequestError as error:
            raise RewardError(f"{self._name} cannot be reached: {type(error).__name__}: {error}") from error

    def _post(self, request: Mapping[str, Any]) -> httpx.Response:
        response = self._client.post(self._url, json=request)
        return response.raise_for_status()

    def _values(self, response: httpx.Response, count: int) -> list[Any]:
        """The response as one mapping per completion, the form that a user's function returns."""
        try:
            answer = response.json()
        except ValueError as error:
            raise RewardError(f"{self._name} did not answer with JSON: {response.text[:_MAX_QUOTED]!r}") from error
        if not isinstance(answer, dict) or "rewards" not in answer or not answer.keys() <= _RESPONSE_KEYS:
            raise RewardError(
                f"{self._name} answered {response.text[:_MAX_QUOTED]!r}; expected a mapping with `rewards` and, "
                "optionally, `scores` and `extra`"
            )
        extra = answer.get("extra") or {}
        if not isinstance(extra, dict):
            raise RewardError(f"{self._name}: `extra` is {extra!r}, expected a mapping of lists")
        columns = {**extra, "reward": answer["rewards"]}
        if answer.get("scores") is not None:
            columns["score"] = answer["scores"]
        for name, column in columns.items():
            if not isinstance(column, list) or len(column) != count:
                given = len(column) if isinstance(column, list) else repr(column)
                raise RewardError(f"{self._name}: {given} values of `{name}` for {count} completions")
        return [{name: column[index] for name, column in columns.items()} for index in range(count)]


def _is_transient(error: BaseException) -> bool:
    """Whether a retry may succeed: no connection, or a server that is busy or has failed."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.NetworkError | httpx.ConnectTimeout | httpx.RemoteProtocolError)


def _variable(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise RewardError(f"the environment variable {name}, which a reward of type http names, is not set in this job")
    return value


def _url(variable: str | None) -> str:
    assert variable is not None
    url = _variable(variable)
    try:
        check_url(url)
    except ValueError as error:
        raise RewardError(f"the environment variable {variable} is not a valid URL of a reward: {error}") from error
    return url


def _header(variable: str) -> dict[str, str]:
    name, colon, value = _variable(variable).partition(":")
    if not (name.strip() and colon and value.strip()):
        raise RewardError(f"the environment variable {variable} must be a header such as `Authorization: Bearer abc`")
    return {name.strip(): value.strip()}
