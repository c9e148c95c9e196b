"""`alignment chat`: conversations with one model, or with several side by side, each in a server of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from rlhf_core.chat.encoding import Tokenizer, encode_prompt, stop_token_ids
from rlhf_core.config.engines.rollout import SamplingConfig
from rlhf_core.errors import AlignmentError, StageError, did_you_mean, one_line

HELP = """\
/system TEXT   a system prompt of TEXT, and a new conversation; without TEXT: none
/reset         a new conversation with the same system prompt
/exit          the end, as is Ctrl-D; Ctrl-C cuts a reply off
"""
_COMMANDS = ("/system", "/reset", "/exit", "/help")


class ChatModel:
    """A model with its conversation. Its prompts are tokenized here as in training, and sent as tokens, not text."""

    def __init__(
        self, name: str, tokenizer: Tokenizer, client: httpx.Client, sampling: SamplingConfig, max_length: int
    ) -> None:
        """client: of a server that serves the model as `name`."""
        self.name = name
        self.messages: list[dict[str, str]] = []
        self.cut = False  # the last reply, at the most tokens that it may have
        self._tokenizer, self._client = tokenizer, client
        self._sampling, self._max_length = sampling, max_length

    def begin(self, system: str) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def reply(self, text: str) -> Iterator[str]:
        """Yield the reply to `text` as it is sampled. Only a whole reply, with `text`, is added to the conversation.

        Raises ConversationError if the template cannot render the conversation, StageError if it is too long or the
        server fails.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = encode_prompt(self._tokenizer, messages)
        room = self._max_length - len(prompt)
        if room <= 0:
            raise StageError(
                f"the conversation has {len(prompt)} tokens, and {self.name} reads {self._max_length} with its reply: "
                "/reset begins a new one"
            )
        reply = ""
        for piece in self._stream(prompt, min(room, self._sampling.max_tokens)):
            reply += piece
            yield piece
        self.messages = [*messages, {"role": "assistant", "content": reply}]

    def _stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[str]:
        sampling = self._sampling.model_dump() | {"max_tokens": max_tokens}
        stop = list(stop_token_ids(self._tokenizer))
        request = {"model": self.name, "prompt": prompt, "stream": True, "stop_token_ids": stop, **sampling}
        try:
            with self._client.stream("POST", "/v1/completions", json=request) as answer:
                if not answer.is_success:
                    raise StageError(f"{self.name}: the server refuses the conversation ({answer.read().decode()})")
                for line in answer.iter_lines():
                    data = line.removeprefix("data: ")
                    if data and data != "[DONE]":
                        yield self._piece(json.loads(data))
        except httpx.HTTPError as error:
            raise StageError(f"{self.name}: its server does not answer any more ({error})") from error

    def _piece(self, event: dict[str, Any]) -> str:
        if "error" in event:
            raise StageError(f"{self.name}: {event['error']['message']}")
        (choice,) = event["choices"]
        self.cut = choice["finish_reason"] == "length"
        return str(choice["text"])


@dataclass
class Chat:
    """Reads a person's messages, and prints the models' replies, one below the other."""

    models: Sequence[ChatModel]
    system: str
    read: Callable[[], str]  # the next line; raises EOFError at the end
    write: Callable[[str], None]
    interactive: bool  # an error or Ctrl-C ends a reply, not the chat
    _over: bool = field(default=False, init=False)

    def run(self) -> None:
        self._begin()
        while not self._over:
            try:
                line = self.read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                return
            if not line:
                continue
            try:
                self._command(line) if line.startswith("/") else self._ask(line)
            except AlignmentError as error:
                if not self.interactive:
                    raise
                self.write(f"\nerror: {error}\n")
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.write("\n(the reply is cut off, and no part of the conversation)\n")

    def _begin(self) -> None:
        for model in self.models:
            model.begin(self.system)

    def _ask(self, text: str) -> None:
        for model in self.models:
            if len(self.models) > 1:
                self.write(f"[{model.name}]\n")
            for piece in model.reply(text):
                self.write(_shown(piece))
            self.write("\n")
            if model.cut and self.interactive:
                self.write("(cut off at --max-tokens)\n")

    def _command(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        match command:
            case "/system":
                self.system = rest.strip()
                self._begin()
            case "/reset":
                self._begin()
            case "/exit":
                self._over = True
            case "/help":
                self.write(HELP)
            case _:
                raise StageError(
                    f"there is no command {command}{did_you_mean(command, _COMMANDS)}; there are {', '.join(_COMMANDS)}"
                )


def _shown(text: str) -> str:
    """Escape control characters, which a terminal would interpret."""
    return "".join(c if c in "\n\t" else one_line(c) for c in text)
