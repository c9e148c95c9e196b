"""An OpenAI-compatible endpoint over a real connection on the loopback. Import it as tests.rlhf_core.chat_endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.services import http_server


class Endpoint:
    """Replies what `reply` says of the last message; keeps the requests."""

    def __init__(self) -> None:
        self.reply: Callable[[str], Any] = lambda text: ""
        self.requests: list[dict[str, Any]] = []
        self.url = ""


@contextmanager
def chat_endpoint() -> Iterator[Endpoint]:
    made = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.requests.append({"path": self.path, "key": self.headers["Authorization"], **request})
            content = made.reply(request["messages"][-1]["content"])
            body = content if isinstance(content, bytes) else json.dumps({
                "choices": [{"message": {"role": "assistant", "content": content}}],
                "usage": {"prompt_tokens": 10, "completion_tokens": 2},
            }).encode()  # fmt: skip
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None: ...

    with http_server(Handler) as url:
        made.url = f"{url}/v1"
        yield made


def words_met(text: str) -> str:
    """The reply to a rubric's usual prompt, of criteria `has WORD`: whether the word is in each answer."""
    answers = re.findall(r"\[(answer_\d+)\]\n(.*?)(?=\n\n\[answer_|\n\nJudge each)", text, re.DOTALL)
    criteria = re.findall(r"\[(criterion_\d+)\] has (\S+)", text)
    return json.dumps({
        answer: {criterion: {"reason": "so", "met": word in said} for criterion, word in criteria}
        for answer, said in answers
    })  # fmt: skip
