"""Requests of the OpenAI API, as far as the policy of a run can answer them; all else is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

MODEL = "policy"
# What changes nothing that is sampled here. The seed is the run's, so that episodes repeat with it.
_IGNORED = {
    "seed", "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key",
    "safety_identifier",
}  # fmt: skip
# The one value that each may have: log-probs of another distribution than the policy's could not be trained on.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "top_logprobs": (0,), "best_of": (1,), "echo": (False,),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
_ROLES = ("system", "user", "assistant", "tool")


class RequestError(Exception):
    """A request that cannot be answered. The message is for the client."""

    def __init__(self, message: str, param: str | None = None, code: str = "unsupported_parameter", status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: Literal["policy"]
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = None
    stop: Annotated[list[str], BeforeValidator(_listed), Field(max_length=16)] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()


class ChatRequest(_Request):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_completion_tokens: int | None = None
    logprobs: bool = False

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TextRequest(_Request):
    prompt: str | list[int]
    logprobs: Literal[0] | None = None


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: Literal["policy"] = "policy"
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []


R = TypeVar("R", bound=BaseModel)


def read_request(body: bytes, kind: type[R], temperature: float) -> R:
    """The request in `body`. temperature: of the run. Raises RequestError, which names what cannot be done."""
    try:
        given = json.loads(body)
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    wanted = {name: value for name, value in given.items() if value is not None and name not in _IGNORED}
    if "temperature" in wanted and (asked := wanted.pop("temperature")) != temperature:
        raise RequestError(
            f"temperature is {asked!r}, but this run samples at {temperature:g}, and trains on the log-probs of that: "
            "leave it out",
            "temperature",
        )
    for name, values in _ONLY.items():
        if name in wanted and (value := wanted.pop(name)) not in values:
            raise RequestError(f"{name} is {value!r}, which this server does not do: leave it out", name)
    if "model" in wanted and wanted["model"] != MODEL:
        raise RequestError(
            f"the model is {wanted['model']!r}, but the only one here is `{MODEL}`", "model", "model_not_found", 404
        )
    try:
        return kind.model_validate(wanted)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        known = "not a parameter that this server knows" if first["type"] == "extra_forbidden" else first["msg"]
        raise RequestError(f"{name}: {known}", name or None) from error


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as chat templates read them, without what says nothing. Raises RequestError for what is no text, or
    asks for no reply."""
    if messages[-1].get("role") == "assistant":
        where = f"messages[{len(messages) - 1}]"
        raise RequestError(f"{where} is the assistant's, so there is nothing to reply to", where, "invalid_messages")
    return [_normalised(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalised(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role is {role!r}; it is one of {', '.join(_ROLES)}", where, "invalid_messages")
    plain: dict[str, Any] = {"role": role, "content": _text(message.get("content"), where)}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    known = {"role", "content", "tool_calls", "name", "tool_call_id"}
    for name, value in message.items():
        if name not in known and value:  # such as refusal: null, annotations: []
            raise RequestError(f"{where}.{name} is {value!r:.100}, which this server does not read", where)
    return plain


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    match content:
        case [*parts] if all(
            isinstance(p, dict) and p.keys() == {"type", "text"} and p["type"] == "text" for p in parts
        ):
            return "".join(str(part["text"]) for part in parts)
    raise RequestError(f"{where}.content must be text, or parts of the type text", where, "invalid_messages")


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"type": "function", "id": str(number), "function": {"name": str(name), "arguments": str(arguments)}}:
            try:
                read = json.loads(arguments)
            except ValueError:
                read = None
            if isinstance(read, dict):
                return {"type": "function", "id": number, "function": {"name": name, "arguments": read}}
    raise RequestError(f"{where} must be a function's call, with its arguments as JSON", where, "invalid_messages")
