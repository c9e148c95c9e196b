"""Messages become tokens: replies that the policy has sampled keep theirs, and only what is new is tokenised."""

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
class Asked:
    """What the policy is asked."""

    messages: list[Message]  # as the client has them
    tools: list[Any]
    written: list[Message]  # the same with each sampled reply as the text that was sampled, its calls of tools included
    token_ids: list[int]
    images: tuple[SequenceImage, ...] = ()  # of the messages, in the order of the tokens


@dataclass(frozen=True, slots=True)
class _Answered:
    asked: Asked
    reply: Message  # as the client was given it
    call: Call

    @property
    def messages(self) -> list[Message]:
        return [*self.asked.messages, self.reply]


class Conversations:
    """Of one episode.

    A request whose messages begin with those of an earlier one and its reply continues it: its prompt is the tokens of
    both, and what the chat template writes behind them. Where the client has changed what was said, or the template
    would write earlier turns in another way, the messages are tokenised from their beginning.
    """

    def __init__(self, tokenizer: Tokenizer, images: Images | None = None) -> None:
        """images: how those of messages become tokens; none: they have none."""
        self._tokenizer, self._images = tokenizer, images
        self._answered: list[_Answered] = []

    def ask(self, messages: Sequence[Message], tools: Sequence[Any]) -> Asked:
        """messages: as `normalised`. Those with another image are other messages.

        Raises StageError if the chat template cannot write them, or if they have too many images.
        """
        messages, tools = list(messages), list(tools)
        continued = [
            each
            for each in self._answered
            if each.asked.tools == tools and messages[: len(each.messages)] == each.messages
        ]
        if continued:
            last = max(continued, key=lambda each: len(each.messages))
            if (asked := self._continued(last, messages, tools)) is not None:
                return asked
        written = encode_prompt(self._tokenizer, messages, tools or None)
        return Asked(messages, tools, messages, *self._with_images(written, messages))

    def add(self, asked: Asked, reply: Message, call: Call) -> None:
        """reply: what the client is given of what `call` has sampled."""
        self._answered.append(_Answered(asked, reply, call))

    def _continued(self, last: _Answered, messages: list[Message], tools: list[Any]) -> Asked | None:
        """None: the template would not write it so."""
        sampled = last.call.completion.token_ids
        text = decode_completion(self._tokenizer, sampled)
        before = [*last.asked.written, {"role": "assistant", "content": text}]
        new = messages[len(last.messages) :]
        ended = sampled[-1] in stop_token_ids(self._tokenizer)
        try:
            between = encode_feedback(self._tokenizer, before, new, tools or None, ended=ended)
        except StageError:
            return None
        said = [*last.call.prompt, *sampled]
        shown = last.asked.images
        between, more = self._with_images(between, new, start=len(said), before=len(shown))
        return Asked(messages, tools, [*before, *new], [*said, *between], (*shown, *more))

    def _with_images(
        self, token_ids: list[int], messages: Sequence[Message], start: int = 0, before: int = 0
    ) -> tuple[list[int], tuple[SequenceImage, ...]]:
        if self._images is None:
            return token_ids, ()
        return self._images.expanded(token_ids, messages, start, before)
