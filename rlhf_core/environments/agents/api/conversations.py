"""Tokenization of messages: sampled replies keep their tokens, and only new messages are tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.chat.encoding import Tokenizer, decode_completion, encode_prompt, stop_token_ids
from rlhf_core.chat.feedback import encode_feedback
from rlhf_core.environments.agents.program import Call, Images
from rlhf_core.errors import StageError

if TYPE_CHECKING:
    from rlhf_core.types import SequenceImage

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PolicyPrompt:
    """A prompt for the policy."""

    messages: list[Message]  # as the client has them
    tools: list[Any]
    written: list[Message]  # the same with each sampled reply as the text that was sampled, its calls of tools included
    token_ids: list[int]
    images: tuple[SequenceImage, ...] = ()  # of the messages, in the order of the tokens


@dataclass(frozen=True, slots=True)
class _Answered:
    prompt: PolicyPrompt
    reply: Message  # as the client was given it
    call: Call

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt.messages, self.reply]


class Conversations:
    """The conversations of one episode.

    A request whose messages begin with those of an earlier one and its reply continues it: its prompt is the tokens of
    both, and the chat template's text after them. If the client has changed earlier messages, or the template would
    render earlier turns differently, the messages are tokenized from the beginning.
    """

    def __init__(self, tokenizer: Tokenizer, images: Images | None = None) -> None:
        """images: tokenization of the images in messages; none: there are none."""
        self._tokenizer, self._images = tokenizer, images
        self._answered: list[_Answered] = []

    def ask(self, messages: Sequence[Message], tools: Sequence[Any]) -> PolicyPrompt:
        """Return the prompt of a request. messages: as `normalised`; messages with different images are different.

        Raises StageError if the chat template cannot render them, or if they have too many images.
        """
        messages, tools = list(messages), list(tools)
        continued = [
            each
            for each in self._answered
            if each.prompt.tools == tools and messages[: len(each.messages)] == each.messages
        ]
        if continued:
            last = max(continued, key=lambda each: len(each.messages))
            if (prompt := self._continued(last, messages, tools)) is not None:
                return prompt
        written = encode_prompt(self._tokenizer, messages, tools or None)
        return PolicyPrompt(messages, tools, messages, *self._with_images(written, messages))

    def add(self, prompt: PolicyPrompt, reply: Message, call: Call) -> None:
        """Record a reply. reply: the client's view of what `call` sampled."""
        self._answered.append(_Answered(prompt, reply, call))

    def _continued(self, last: _Answered, messages: list[Message], tools: list[Any]) -> PolicyPrompt | None:
        """Continue `last`; None if the template would render it differently."""
        sampled = last.call.completion.token_ids
        text = decode_completion(self._tokenizer, sampled)
        before = [*last.prompt.written, {"role": "assistant", "content": text}]
        new = messages[len(last.messages) :]
        ended = sampled[-1] in stop_token_ids(self._tokenizer)
        try:
            between = encode_feedback(self._tokenizer, before, new, tools or None, ended=ended)
        except StageError:
            return None
        tokens = [*last.call.prompt, *sampled]
        shown = last.prompt.images
        between, more = self._with_images(between, new, start=len(tokens), before=len(shown))
        return PolicyPrompt(messages, tools, [*before, *new], [*tokens, *between], (*shown, *more))

    def _with_images(
        self, token_ids: list[int], messages: Sequence[Message], start: int = 0, before: int = 0
    ) -> tuple[list[int], tuple[SequenceImage, ...]]:
        if self._images is None:
            return token_ids, ()
        return self._images.expanded(token_ids, messages, start, before)
