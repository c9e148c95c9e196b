"""The events of a streamed response."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.environments.agents.api.replies import Answer, Begun, Delta, Ended
from rlhf_core.environments.agents.api.response_items import message_item, text_part
from rlhf_core.environments.agents.api.scores import token_scores
from rlhf_core.environments.agents.api.sse import event


class ResponseEvents:
    def __init__(
        self, tokenizer: Tokenizer, empty: Mapping[str, Any], whole: Callable[[Answer], dict[str, Any]], *,
        with_logprobs: bool,
    ) -> None:  # fmt: skip
        """empty: the response before anything is sampled. whole: returns it as it ends."""
        self._tokenizer, self._empty, self._whole, self._with_logprobs = tokenizer, empty, whole, with_logprobs
        self._number = 0
        self._text_is_open = False

    def of(self, piece: Begun | Delta | Ended) -> Iterator[bytes]:
        match piece:
            case Begun():
                yield self._event("created", response=self._empty)
                yield self._event("in_progress", response=self._empty)
            case Delta(_, text, tokens, first):
                scores = token_scores(self._tokenizer, tokens, first) if self._with_logprobs else []
                if text or scores:
                    yield from self._open_text()
                    yield self._event("output_text.delta", **self._in_text(), delta=text, logprobs=scores)
            case Ended(_, answer):
                yield from self._ended(answer)

    def _ended(self, answer: Answer) -> Iterator[bytes]:
        if not answer.calls:
            yield from self._open_text()  # of an empty reply too
        response = self._whole(answer)
        if self._text_is_open and response["output"][0]["type"] != "message":
            # Its tokens were shown with no text.
            response["output"].insert(0, message_item(self._empty["id"], "completed", [text_part("")]))
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                (part,) = item["content"]
                ended = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("output_text.done", **self._in_text(), **ended)
                yield self._event("content_part.done", **self._in_text(), part=part)
            else:
                begun = {**item, "arguments": "", "status": "in_progress"}
                place = {"output_index": index, "item_id": item["id"]}
                yield self._event("output_item.added", output_index=index, item=begun)
                yield self._event("function_call_arguments.delta", **place, delta=item["arguments"])
                name = {"name": item["name"], "arguments": item["arguments"]}
                yield self._event("function_call_arguments.done", **place, **name)
            yield self._event("output_item.done", output_index=index, item=item)
        yield self._event(response["status"], response=response)

    def _open_text(self) -> Iterator[bytes]:
        if not self._text_is_open:
            self._text_is_open = True
            item = message_item(self._empty["id"], "in_progress", [])
            yield self._event("output_item.added", output_index=0, item=item)
            yield self._event("content_part.added", **self._in_text(), part=text_part(""))

    def _in_text(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._empty['id']}", "output_index": 0, "content_index": 0}

    def _event(self, name: str, /, **data: Any) -> bytes:
        self._number += 1
        kind = f"response.{name}"
        return event({"type": kind, "sequence_number": self._number, **data}, kind)
