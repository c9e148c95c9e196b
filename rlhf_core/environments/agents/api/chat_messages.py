"""Messages of chat completions: text and images in the chat template's form, everything else is rejected by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.chat.image_messages import IMAGE
from rlhf_core.data.formats.base import RowError
from rlhf_core.environments.agents.api.errors import RequestError
from rlhf_core.environments.agents.program import Images

_ROLES: Mapping[str, str] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
_DATA = "data:"


def normalised(messages: Sequence[Mapping[str, Any]], images: Images | None = None) -> list[dict[str, Any]]:
    """Convert messages to the chat template's form, without empty fields; images as in canonical rows.

    images: reads and keeps images; none: the policy reads text alone. Raises RequestError for content other than text
    and readable images, and for messages that request no reply.
    """
    if messages[-1].get("role") == "assistant":
        where = f"messages[{len(messages) - 1}]"
        raise RequestError(f"{where} is the assistant's, so there is nothing to reply to", where, "invalid_messages")
    return [_normalised(message, f"messages[{index}]", images) for index, message in enumerate(messages)]


def normalised_reply(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply as a client will repeat it."""
    return _normalised(message, "reply", None)


def _normalised(message: Mapping[str, Any], where: str, images: Images | None) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where}.role is {role!r}; it is one of {', '.join(_ROLES)}", where, "invalid_messages")
    plain: dict[str, Any] = {"role": _ROLES[role], **_content(message.get("content"), role, where, images)}
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
