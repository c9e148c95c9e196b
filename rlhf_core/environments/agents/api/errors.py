"""Requests that cannot be served, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from rlhf_core.environments.agents.program import CallError


class RequestError(Exception):
    """A request that cannot be served. The message is for the client."""

    def __init__(self, message: str, param: str | None = None, code: str = "unsupported_parameter", status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    @classmethod
    def of(cls, error: CallError) -> RequestError:
        return cls(str(error), code=error.code)


def openai_error(error: RequestError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
