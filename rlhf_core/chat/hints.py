"""Text appended to the user's last message: a hint for a teacher, or the target reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_core.chat.image_messages import IMAGE
from rlhf_core.errors import ConversationError

Hint = Callable[[Mapping[str, Any]], str]  # of a canonical row


def append_to_prompt(messages: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """Return the messages with `text` appended to the last one of the user.

    Raises ConversationError if there is none, or if it has images and the text contains the image character.
    """
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ConversationError(f"the prompt has no user message to append {text[:40]!r} to")
    if IMAGE in text and "images" in messages[last]:
        raise ConversationError(f"{text[:40]!r} holds the character U+FFFC, which stands for an image in this prompt")
    return [*messages[:last], {**messages[last], "content": messages[last]["content"] + text}, *messages[last + 1 :]]
