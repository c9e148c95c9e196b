"""A reward from a server: completions as JSON there, rewards back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from rlhf_core.config.rewards import HTTPReward, check_url
from rlhf_core.errors import RewardError
from rlhf_core.rewards.base import RewardResult, checked_result

_ANSWER = frozenset({"rewards", "scores", "extra"})
_SHOWN = 500  # characters of an answer in an error
_LONGEST_PAUSE = 10.0  # seconds between two tries


class RewardServer:
    """POST {"completions", "prompts", "rows"}, each a list; the answer is {"rewards": […]}, and if the server likes
    {"scores": […], "extra": {name: […]}}, all as long as the completions.

    Scoring changes nothing, so a request is repeated where there is no connection or the status is 429 or 5xx. Any
    other failure, a late answer among them, is a RewardError at once.
    """

    def __init__(self, config: HTTPReward) -> None:
        """Raises RewardError if an environment variable that the config names is not set, or not what it should be."""
        self._config = config
        self._url = config.url or _url(config.url_variable)
        self._name = f"reward server {config.url or f'of {config.url_variable}'}"
        self._client = httpx.Client(
            timeout=config.timeout_seconds, headers=_header(config.header_variable) if config.header_variable else None
        )

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        values: list[Mapping[str, Any]] = []
        for start in range(0, len(completions), self._config.batch_size):
            part = slice(start, start + self._config.batch_size)
            batch = {"completions": list(completions[part]), "prompts": list(prompts[part])}
            response = self._answer({**batch, "rows": [dict(row) for row in rows[part]]})
            values += self._values(response, len(batch["completions"]))
        return checked_result(values, len(completions), self._name)

    def close(self) -> None:
        self._client.close()

    def _answer(self, request: Mapping[str, Any]) -> httpx.Response:
        retrying = Retrying(
            stop=stop_after_attempt(self._config.attempts),
            wait=wait_random_exponential(multiplier=0.2, max=_LONGEST_PAUSE),
            retry=retry_if_exception(_may_pass),
            reraise=True,
        )
        try:
            return retrying(self._post, request)
        except httpx.HTTPStatusError as error:
            status, body = error.response.status_code, error.response.text[:_SHOWN]
            # Its own text has the URL, which may be a secret of the environment.
            raise RewardError(f"{self._name} answered with status {status}: {body}") from None
        except httpx.TimeoutException as error:
            limit = self._config.timeout_seconds
            raise RewardError(f"{self._name} did not answer within {limit:g} s ({type(error).__name__})") from error
        except httpx.RequestError as error:
            raise RewardError(f"{self._name} cannot be reached: {type(error).__name__}: {error}") from error

    def _post(self, request: Mapping[str, Any]) -> httpx.Response:
        response = self._client.post(self._url, json=request)
        return response.raise_for_status()

    def _values(self, response: httpx.Response, count: int) -> list[Mapping[str, Any]]:
        """The answer as one mapping for each completion, as a user's function returns them."""
        try:
            answer = response.json()
        except ValueError as error:
            raise RewardError(f"{self._name} answered with no JSON: {response.text[:_SHOWN]!r}") from error
        if not isinstance(answer, dict) or "rewards" not in answer or not answer.keys() <= _ANSWER:
            raise RewardError(
                f"{self._name} answered {response.text[:_SHOWN]!r}; expected a mapping with `rewards`, and at most "
                "`scores` and `extra` beside it"
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


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later: no connection, a busy or a broken server."""
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
        raise RewardError(f"the environment variable {variable} holds no URL for a reward: {error}") from error
    return url


def _header(variable: str) -> dict[str, str]:
    name, colon, value = _variable(variable).partition(":")
    if not (name.strip() and colon and value.strip()):
        raise RewardError(f"the environment variable {variable} must hold a header, as `Authorization: Bearer abc`")
    return {name.strip(): value.strip()}
