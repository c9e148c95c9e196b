"""A policy for tests of programs: the record of one episode, over an engine that a function scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_core.chat.encoding import Tokenizer, load_tokenizer, stop_token_ids
from rlhf_core.episodes.calls import Calls
from rlhf_core.episodes.engine_queue import Heard
from rlhf_core.episodes.episode import EpisodeRules
from rlhf_core.episodes.shown_images import ShownImages
from rlhf_core.rollout.engine import Request, SamplingParameters, Unfinished
from rlhf_core.rollout.tool_calls import ParsedReply, ToolCall
from rlhf_core.types import Completion
from tests.rlhf_core.stages.supervised_runs import base_model

MOST_TOKENS = 80
# Writes all roles, tools and their calls.
TEMPLATE = """
{%- if tools %}<user>{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<assistant>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- eos_token }}
{%- else %}<user>{{ message.role }}:{{ message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def tokenizer_in(folder: Path) -> Tokenizer:
    """Of letters, with TEMPLATE."""
    tokenizer = load_tokenizer(base_model(folder).folder)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def policy(
    tokenizer: Tokenizer,
    reply: Callable[[str], str | None],
    *,
    turns: int = 8,
    max_length: int = 200,
    temperature: float = 1.0,
    cancelled: list[str] | None = None,
    images: ShownImages | None = None,
    structures: bool = False,
) -> Calls:
    """reply: what is said to a prompt, by its text; None: nothing, ever. The log-prob of token t is -t / 100.

    cancelled: where the prompts of cancelled calls are written down. images: how it is shown any. structures: it serves
    replies of a JSON schema, which the script must keep to.
    """
    parameters = SamplingParameters(
        temperature=temperature, top_p=1.0, max_tokens=MOST_TOKENS, stop_token_ids=stop_token_ids(tokenizer)
    )

    async def ask(request: Request, heard: Heard | None = None) -> Completion:
        prompt = str(tokenizer.decode(list(request.prompt)))
        said = reply(prompt)
        if said is None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if cancelled is not None:
                    cancelled.append(prompt)
                raise
        whole = completed(tokenizer, str(said), request.parameters.max_tokens)
        if request.top_logprobs:
            top = [{token: -token / 100, 0: -9.0} for token in whole.token_ids]
            whole = replace(whole, top_logprobs=tuple(top))
        for count in range(1, len(whole.token_ids)):
            if heard is None:
                break
            heard(Unfinished(whole.token_ids[:count], whole.logprobs[:count], whole.top_logprobs[:count]))
            await asyncio.sleep(0)
        return whole

    rules = EpisodeRules(
        tokenizer, turns, max_length, parameters, "agent", images=images, structures_replies=structures
    )
    return Calls(rules, lambda n: n, ask)


def completed(tokenizer: Tokenizer, text: str, most: int = MOST_TOKENS) -> Completion:
    tokens: Sequence[int] = [
        *tokenizer(text, add_special_tokens=False)["input_ids"], stop_token_ids(tokenizer)[-1]
    ]  # fmt: skip
    cut = tuple(tokens[:most])
    return Completion(cut, tuple(-token / 100 for token in cut), "stop" if len(tokens) <= most else "length", 0)


class Hermes:
    """As vLLM's parser of the format hermes, which takes seconds to import."""

    marker = "<tool_call>"

    async def read(self, text: str, tools: object) -> ParsedReply:
        content, found, rest = text.partition("<tool_call>")
        if not found:
            return ParsedReply(text, ())
        call = json.loads(rest.removesuffix("</tool_call>"))
        return ParsedReply(content, (ToolCall(call["name"], call["arguments"]),))
