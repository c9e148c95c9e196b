"""Requests: the supported subset is parsed, everything else is rejected by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rlhf_core.environments.agents.api.errors import RequestError

POLICY = "policy"  # the name of the model; a request may use any other


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopTexts = Annotated[list[str], BeforeValidator(_listed), Field(max_length=16)]


class Part(BaseModel):
    """A part of a request, which has no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ApiRequest(Part):
    ignored: ClassVar[frozenset[str]] = frozenset()  # parameters without effect on sampling here
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # the values that a parameter may have, which change nothing

    model: str = POLICY
    temperature: float | None = None  # none: that of the run
    top_p: float | None = None  # likewise


R = TypeVar("R", bound=ApiRequest)


def read_request(body: bytes, kind: type[R]) -> R:
    """Parse a request. Raises RequestError, which names the unsupported part."""
    try:
        parameters = json.loads(body)
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(parameters, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    wanted = {name: value for name, value in parameters.items() if value is not None and name not in kind.ignored}
    for name, values in kind.only.items():
        if name in wanted and (value := wanted.pop(name)) not in values:
            raise RequestError(f"{name} is {value!r}, which this server does not do: leave it out", name)
    try:
        return kind.model_validate(wanted)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        reason = "not a parameter that this server knows" if first["type"] == "extra_forbidden" else first["msg"]
        raise RequestError(f"{name}: {reason}", name or None) from error
