"""Messages with images, in the form of chat templates. Loads no torch.

In a canonical message an image is one character of the text, IMAGE, and `images` lists the SHA-256 of their files in
order. In a message without `images`, the character is ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlhf_core.errors import ConversationError

IMAGE = "\ufffc"  # the object replacement character
_ATTRIBUTE = "image_token"  # of a tokenizer; transformers' processors use it, too
_WORD = 4  # hex digits
_COLUMNS = ("messages", "prompt", "chosen", "rejected")  # of canonical rows: those that may be messages
_TEXT = "text-of-a-part"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A part of a content: an image that was read. No row of a source can contain one."""

    sha256: str


def is_image_name(value: object) -> bool:
    """Return whether `value` is a SHA-256 in hex digits, the name of an image's file."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def set_image_token(tokenizer: Any, token: str) -> None:
    """Set the image token of a tokenizer. token: the text that its model reads in place of each image."""
    setattr(tokenizer, _ATTRIBUTE, token)


def image_token(tokenizer: Any) -> str | None:
    """Return the image token; None if the model reads text only."""
    return getattr(tokenizer, _ATTRIBUTE, None)


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the SHA-256 of each image, in order."""
    return [digest for message in messages for digest in message.get("images", ())]


def images_of_row(row: Mapping[str, Any]) -> list[str]:
    """Return the SHA-256 of each image of a canonical row of any format."""
    return [
        digest for column in _COLUMNS if isinstance(messages := row.get(column), list) for digest in images_of(messages)
    ]


def images_in(content: Any) -> list[str]:
    """Return the SHA-256 of each image that was read in a content, which may be text, parts, or anything else."""
    return [part.sha256 for part in content if isinstance(part, ImagePart)] if isinstance(content, list) else []


def without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "images"}


def compared_text(message: Mapping[str, Any]) -> str:
    """Return the text by which rows are compared: the same question about another image is another question.

    So an image counts as sixteen words, those of its SHA-256.
    """
    content: str = message["content"]
    if "images" not in message:
        return content
    first, *others = content.split(IMAGE)
    return first + "".join(f" {_words(each)} {text}" for each, text in zip(message["images"], others, strict=True))


def _words(digest: str) -> str:
    return " ".join(digest[start : start + _WORD] for start in range(0, len(digest), _WORD))


def for_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the model's own image token, or with parts, if the template takes these.

    Raises ConversationError for a message with images if the model reads text only.
    """
    token = image_token(tokenizer)
    if token is None:
        if images_of(messages):
            raise ConversationError(
                "a message has images, but the model reads text alone: take a model that reads images, or such rows out"
            )
        return [dict(message) for message in messages]
    if _takes_parts(tokenizer, str(tokenizer.chat_template)):
        return [{**without_images(message), "content": list(content_parts(message))} for message in messages]
    return [
        {**without_images(m), "content": m["content"].replace(IMAGE, token) if "images" in m else m["content"]}
        for m in messages
    ]


def content_parts(message: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the content as parts of the types text and image, the latter without the image itself."""
    content: str = message["content"]
    pieces = content.split(IMAGE) if "images" in message else [content]
    for index, piece in enumerate(pieces):
        if index:
            yield {"type": "image"}
        if piece or len(pieces) == 1:
            yield {"type": "text", "text": piece}


@lru_cache(maxsize=32)
def _takes_parts(tokenizer: Any, template: str) -> bool:
    """Return whether the chat template renders the text of a content that is a list of parts, and not the list itself.

    template: the tokenizer's, so that replacing it invalidates the cache.
    """
    messages = [{"role": "user", "content": [{"type": "text", "text": _TEXT}]}]
    try:
        written = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template is a program: one that raises takes texts alone
        return False
    return _TEXT in written and "'type'" not in written


def up_to_last_reply(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the messages up to the last reply; later ones are not part of a trained sequence."""
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return messages[:last]
