"""Requests of the OpenAI API: the supported subset is parsed, everything else is rejected by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rlhf_core.chat.image_messages import IMAGE
from rlhf_core.data.formats.base import RowError
from rlhf_core.environments.agents.program import Images

MODEL = "policy"
# Parameters without effect on sampling here. The seed is the run's, so that episodes repeat with it.
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
_DATA = "data:"


class RequestError(Exception):
    """A request that cannot be served. The message is for the client."""

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
    """Parse a request. temperature: of the run. Raises RequestError, which names the unsupported part."""
    try:
        parameters = json.loads(body)
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(parameters, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    wanted = {name: value for name, value in parameters.items() if value is not None and name not in _IGNORED}
    if "temperature" in wanted and (requested := wanted.pop("temperature")) != temperature:
        raise RequestError(
            f"temperature is {requested!r}, but this run samples at {temperature:g}, and trains on the log-probs of "
            "that: leave it out",
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
        reason = "not a parameter that this server knows" if first["type"] == "extra_forbidden" else first["msg"]
        raise RequestError(f"{name}: {reason}", name or None) from error


def normalised(messages: Sequence[Mapping[str, Any]], images: Images | None = None) -> list[dict[str, Any]]:
    """Convert messages to the chat template's form, without empty fields; images as in canonical rows.

    images: reads and keeps images; none: the policy reads text alone. Raises RequestError for content other than text
    and readable images, and for messages that request no reply.
    """
    if messages[-1].get("role") == "assistant":
        where = f"messages[{len(messages) - 1}]"
        raise RequestError(f"{where} is the assistant's, so there is nothing to reply to", where, "invalid_messages")
    return [_normalised(message, f"messages[{index}]", images) for index, message in enumerate(messages)]


def _normalised(message: Mapping[str, Any], where: str, images: Images | None) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role is {role!r}; it is one of {', '.join(_ROLES)}", where, "invalid_messages")
    plain: dict[str, Any] = {"role": role, **_content(message.get("content"), role, where, images)}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    supported = {"role", "content", "tool_calls", "name", "tool_call_id"}
    for name, value in message.items():
        if name not in supported and value:  # such as refusal: null, annotations: []
            raise RequestError(f"{where}.{name} is {value!r:.100}, which this server does not read", where)
    return plain


def _content(content: Any, role: str, where: str, images: Images | None) -> dict[str, Any]:
    """Return `content`, and `images` if there are any."""
    if content is None or isinstance(content, str):
        return {"content": content or ""}
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be text, or a list of parts", where, "invalid_messages")
    texts, digests = [], []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        match part:
            case {"type": "text", "text": str(text), **rest} if not rest:
                texts.append(text)
            case {"type": "image_url", "image_url": image, **rest} if not rest and role == "user":
                texts.append(IMAGE)
                digests.append(_image(image, place, images))
            case _:
                raise RequestError(
                    f"{place} must be of the type text, or in a message of the user image_url",
                    place,
                    "invalid_messages",
                )
    text = "".join(texts)
    if not digests:
        return {"content": text}
    if text.count(IMAGE) != len(digests):
        raise RequestError(
            f"{where}.content holds the character U+FFFC, which stands for an image there: take it out of the text",
            where,
            "invalid_messages",
        )
    return {"content": text, "images": digests}


def _image(image: Any, place: str, images: Images | None) -> str:
    """Return the SHA-256 of an image contained in the request: URLs are not fetched, and local files not read."""
    if images is None:
        raise RequestError(
            f"{place} is an image, but the policy reads text alone, or something that reads its episodes does", place,
            "unsupported_image",
        )  # fmt: skip
    match image:
        case {"url": str(url), **rest} if not rest or rest == {"detail": "auto"}:
            pass
        case _:
            raise RequestError(
                f"{place}.image_url must have `url`, and beside it at most the detail auto", place, "invalid_image"
            )
    if not url.startswith(_DATA):
        raise RequestError(
            f"{place}.image_url.url is {url[:40]!r}, which is not fetched: give a data URL, data:image/png;base64,…",
            place,
            "invalid_image",
        )
    try:
        return images.read(url, place)
    except RowError as error:
        raise RequestError(str(error), place, "invalid_image") from error


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
