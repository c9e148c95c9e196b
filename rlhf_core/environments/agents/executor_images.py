"""Images among the tokens of an executor: its process names them by number, and can neither change nor invent one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_core.chat.encoding import encode_prompt
from rlhf_core.chat.image_messages import IMAGE, image_token
from rlhf_core.chat.special_tokens import token_ids
from rlhf_core.data.formats.base import RowError
from rlhf_core.data.images import IMAGE_PART, IMAGE_URL_PART
from rlhf_core.environments.agents.program import CallError, Policy
from rlhf_core.errors import ConversationError, EpisodeError

if TYPE_CHECKING:
    from rlhf_core.types import Completion, SequenceImage

_CODE = "invalid_image"


class ExecutorImages:
    """The images of one episode. Methods raise CallError for what the policy does not read."""

    def __init__(self, policy: Policy) -> None:
        self._tokenizer, self._images = policy.tokenizer, policy.images
        self._known: list[tuple[SequenceImage, tuple[int, ...]]] = []  # by number, each with its tokens
        self._sampled: set[int] = set()  # tokens of images that the policy has written itself, which are text

    def encoded(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> dict[str, Any]:
        """Return the tokens of the rendered messages, and the numbers and first tokens of their images."""
        read = [self._read(message) for message in messages]
        return self._numbered(encode_prompt(self._tokenizer, read, tools), read)

    def tokenized(self, content: Any) -> dict[str, Any]:
        """Return the tokens of a text, or of a content of parts, alone; and its images as `encoded`."""
        message = self._read({"role": "user", "content": content})
        text: str = message["content"]
        token = image_token(self._tokenizer)
        if "images" in message and token is not None:
            text = text.replace(IMAGE, token)
        return self._numbered(token_ids(self._tokenizer, text), [message])

    def placed(self, prompt: Sequence[int], claimed: Sequence[Any]) -> tuple[SequenceImage, ...]:
        """Return the images of a prompt. claimed: the number and the first token of each, in order."""
        images: list[SequenceImage] = []
        text: list[int] = []  # tokens outside of images
        end = 0
        for each in claimed:
            match each:
                case [int(number), int(start)] if 0 <= number < len(self._known):
                    image, tokens = self._known[number]
                case _:
                    raise EpisodeError(f"it sent the policy the image {each!r:.100}, which does not exist")
            if start < end or tuple(prompt[start : start + len(tokens)]) != tokens:
                raise CallError(
                    f"the prompt has other tokens than those of its image at {start}: keep the tokens of an image "
                    "together, and join lists by `+`",
                    _CODE,
                )
            images.append(replace(image, start=start))
            text += prompt[end:start]
            end = start + len(tokens)
        text += prompt[end:]
        if self._images is not None:
            self._require_few(len(images))
            if lost := (self._images.tokens - self._sampled).intersection(text):
                raise CallError(
                    f"the prompt has the token {min(lost)}, which stands for an image, and there is none: join lists "
                    "of tokens by `+`, which keeps their images",
                    _CODE,
                )
        return tuple(images)

    def sampled(self, completion: Completion) -> None:
        """Take note of a reply: whatever its tokens are, they are text."""
        if self._images is not None:
            self._sampled |= self._images.tokens.intersection(completion.token_ids)

    def _read(self, message: Any) -> Any:
        """Return a message with its images read, in the form of canonical rows."""
        if not isinstance(message, Mapping):
            return message
        if "images" in message:
            raise CallError("a message has `images`: show each as a part of its `content`", _CODE)
        if not isinstance(content := message.get("content"), list):
            return message
        if self._images is None:
            kinds = {part.get("type") for part in content if isinstance(part, Mapping)}
            if kinds & {IMAGE_PART, IMAGE_URL_PART}:
                raise CallError(
                    "a message has an image, but the policy reads text alone, or something that reads its episodes "
                    "does",
                    "unsupported_image",
                )
            return message
        try:
            return self._images.message(message)
        except RowError as error:
            raise CallError(f"a message cannot be used: {error}", _CODE) from error

    def _numbered(self, ids: list[int], messages: Sequence[Any]) -> dict[str, Any]:
        if self._images is None:
            return {"token_ids": ids, "images": []}
        try:
            ids, placed = self._images.expanded(ids, messages)
        except ConversationError as error:
            raise CallError(str(error), _CODE) from error
        first = len(self._known)
        self._known += [(image, tuple(ids[image.start : image.start + image.length])) for image in placed]
        return {"token_ids": ids, "images": [[first + n, image.start] for n, image in enumerate(placed)]}

    def _require_few(self, count: int) -> None:
        assert self._images is not None
        try:
            self._images.require_few(count)
        except ConversationError as error:
            raise CallError(str(error), _CODE) from error
