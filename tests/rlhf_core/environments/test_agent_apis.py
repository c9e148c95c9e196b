"""All APIs of the policy, asked by the clients of OpenAI and Anthropic: deltas, calls of tools, structures, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.environments.agents.api.anthropic_messages import chat_messages
from rlhf_core.environments.agents.api.server import PolicyServer
from rlhf_core.episodes.calls import Calls, joined
from rlhf_core.rollout.engine import Request
from tests.rlhf_core.environments.policies import Hermes, policy, tokenizer_in

pytestmark = pytest.mark.parts

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FUNCTION = {"name": "add", "description": "adds", "parameters": PARAMETERS}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
RESPONSE_TOOL: Any = {"type": "function", **FUNCTION, "strict": True}
MESSAGES_TOOL: Any = {"name": "add", "description": "adds", "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}}  # fmt: skip  # noqa: E501
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
QUESTION: Any = {"role": "user", "content": "a?"}
Agent = Callable[[AsyncOpenAI, AsyncAnthropic], Awaitable[Any]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("base"))


def play(made: Calls, agent: Agent, **server: Any) -> Any:
    async def episode() -> Any:
        async with (
            PolicyServer(**server).episode(made) as (url, key),
            AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as of_openai,
            AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as of_anthropic,
        ):
            return await agent(of_openai, of_anthropic)

    return asyncio.run(episode())


def one_sequence(made: Calls, tokenizer: Tokenizer) -> str:
    (sequence,) = joined([call for call in made.completed if call.trained])
    return str(tokenizer.decode(list(sequence.token_ids)))


def asks_for_x(prompt: str) -> str:
    return "done" if "tool:" in prompt else f"so {CALL}"


# Chat completions


def test_chat_streams_what_is_sampled_up_to_a_stop_text(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, lambda prompt: "abcdSTfgh")

    async def agent(client: AsyncOpenAI, _: Any) -> list[Any]:
        stream = await client.chat.completions.create(
            model="any-name", messages=[QUESTION], stream=True, stop=["ST"], logprobs=True, top_logprobs=2,
            stream_options={"include_usage": True},
        )  # fmt: skip
        return [chunk async for chunk in stream]

    chunks = play(made, agent)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(pieces) > 2
    assert "".join(pieces) == "abcd"
    assert {chunk.model for chunk in chunks} == {"any-name"}
    scores = [each for chunk in chunks if chunk.choices and chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]  # fmt: skip  # noqa: E501
    (call,) = made.completed
    assert [each.logprob for each in scores] == list(call.completion.logprobs)
    assert "".join(each.token for each in scores) == "abcdST"
    assert [each.logprob for each in scores[0].top_logprobs] == pytest.approx([scores[0].logprob, -9.0])
    assert chunks[-1].usage.completion_tokens == len(call.completion.token_ids) == 6


def test_chat_streams_calls_of_tools_and_never_their_marks(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, asks_for_x, max_length=600)

    async def agent(client: AsyncOpenAI, _: Any) -> None:
        async with client.chat.completions.stream(model="m", messages=[QUESTION], tools=[CHAT_TOOL]) as stream:
            shown = [each.delta async for each in stream if each.type == "content.delta"]
            message = (await stream.get_final_completion()).choices[0].message
        assert len(shown) > 1
        assert (message.content, "".join(shown)) == ("so ", "so ")
        (call,) = message.tool_calls or ()
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"x": 1})
        said = message.model_dump(include={"role", "content"}) | {"tool_calls": [call.model_dump(include={"id", "type", "function"})]}  # fmt: skip  # noqa: E501
        said["tool_calls"][0]["function"].pop("parsed_arguments", None)
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        again: Any = [QUESTION, said, result]
        last = await client.chat.completions.create(model="m", messages=again, tools=[CHAT_TOOL])
        assert last.choices[0].message.content == "done"

    play(made, agent, tool_parser=Hermes())
    assert one_sequence(made, tokenizer).endswith(f"<assistant>so {CALL}<eos><user>tool:2<assistant>done<eos>")


class Sum(BaseModel):
    x: int


def structured(tokenizer: Tokenizer, reply: str) -> tuple[Calls, list[Request]]:
    made, asked = policy(tokenizer, lambda prompt: reply, structures=True, max_length=600), []
    ask = made._ask

    async def recorded(request: Request, *listener: Any) -> Any:
        asked.append(request)
        return await ask(request, *listener)

    made._ask = recorded
    return made, asked


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_reply_of_a_schema_is_served_and_not_trained(tokenizer: Tokenizer, api: str) -> None:
    made, asked = structured(tokenizer, '{"x": 4}')

    async def agent(client: AsyncOpenAI, _: Any) -> None:
        if api == "chat":
            chat = await client.chat.completions.parse(model="m", messages=[QUESTION], response_format=Sum)
            read = chat.choices[0].message.parsed
        else:
            read = (await client.responses.parse(model="m", input="a?", text_format=Sum)).output_parsed
        assert read == Sum(x=4)
        await client.chat.completions.create(model="m", messages=[QUESTION], response_format={"type": "json_object"})

    play(made, agent)
    schema = json.loads(asked[0].structure or "")
    assert (schema["properties"], schema["required"]) == ({"x": {"title": "X", "type": "integer"}}, ["x"])
    assert asked[1].structure == '{"type": "object"}'
    assert [call.trained for call in made.completed] == [False, False]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_call_that_must_be_made_is_a_structure(tokenizer: Tokenizer, choice: str, stream: bool) -> None:
    made, asked = structured(tokenizer, '[{"name": "add", "parameters": {"x": 5}}]')
    other = {"type": "function", "function": {"name": "other"}}
    tools: Any = [CHAT_TOOL, other]
    named: Any = {"type": "function", "function": {"name": "add"}}

    async def agent(client: AsyncOpenAI, anthropics: AsyncAnthropic) -> None:
        async with client.chat.completions.stream(
            model="m",
            messages=[QUESTION],
            tools=tools,
            tool_choice="required" if choice == "required" else named,
            parallel_tool_calls=not stream,
        ) as whole:
            chosen = (await whole.get_final_completion()).choices[0]
        (call,) = chosen.message.tool_calls or ()
        assert (chosen.message.content or "", chosen.finish_reason) == ("", "tool_calls")
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"x": 5})
        wanted: Any = {"type": "any"} if choice == "required" else {"type": "tool", "name": "add"}
        wanted["disable_parallel_tool_use"] = stream
        given: Any = {"model": "m", "max_tokens": 9999, "messages": [QUESTION], "tools": [MESSAGES_TOOL]}
        if stream:
            async with anthropics.messages.stream(**given, tool_choice=wanted) as events:
                message = await events.get_final_message()
        else:
            message = await anthropics.messages.create(**given, tool_choice=wanted)
        (block,) = message.content
        assert (block.type, block.name, block.input) == ("tool_use", "add", {"x": 5})
        assert message.stop_reason == "tool_use"

    play(made, agent)  # without a parser: the structure says where the calls are
    schemas = [json.loads(each.structure or "") for each in asked]
    assert [schema.get("maxItems") for schema in schemas] == [1 if stream else None] * 2
    names = [each["properties"]["name"]["enum"] for each in schemas[0]["items"]["anyOf"]]
    assert names == ([["add"], ["other"]] if choice == "required" else [["add"]])
    assert asked[1].parameters.max_tokens == made.max_tokens


def test_definitions_of_schemas_are_moved_to_the_root(tokenizer: Tokenizer) -> None:
    made, asked = structured(tokenizer, "[]")
    inner = {"$defs": {"D": {"type": "string"}}, "type": "object", "properties": {"d": {"$ref": "#/$defs/D"}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": inner}}]

    async def agent(client: AsyncOpenAI, _: Any) -> None:
        await client.chat.completions.create(model="m", messages=[QUESTION], tools=tools, tool_choice="required")
        clash = {**inner, "$defs": {"D": {"type": "integer"}}}
        both = [*tools, {"type": "function", "function": {"name": "g", "parameters": clash}}]
        with pytest.raises(openai.BadRequestError, match=r"two schemas define `\$defs.D` differently"):
            await client.chat.completions.create(model="m", messages=[QUESTION], tools=both, tool_choice="required")

    play(made, agent)
    schema = json.loads(asked[0].structure or "")
    assert schema["$defs"] == {"D": {"type": "string"}}
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]


# Responses


def test_responses_continue_each_other_by_name_and_by_their_items(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, asks_for_x, max_length=600)

    async def agent(client: AsyncOpenAI, _: Any) -> None:
        first = await client.responses.create(model="m", input="a?", instructions="be brief", tools=[RESPONSE_TOOL])
        assert (first.output_text, first.status, first.output[0].type) == ("so ", "completed", "message")
        call: Any = first.output[1]
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"x": 1})
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        by_name = await client.responses.create(
            model="m", input=[result], instructions="be brief", tools=[RESPONSE_TOOL], previous_response_id=first.id
        )
        items: Any = [QUESTION, *(each.model_dump() for each in first.output), result]
        by_items = await client.responses.create(
            model="m", input=items, instructions="be brief", tools=[RESPONSE_TOOL], store=False
        )
        assert (by_name.output_text, by_items.output_text) == ("done", "done")
        assert by_items.usage is not None
        assert by_items.usage.input_tokens == len(made.completed[2].prompt)

    play(made, agent, tool_parser=Hermes())
    first, by_name, by_items = made.completed
    assert by_name.prompt == by_items.prompt
    assert by_name.prompt[: len(first.prompt) + len(first.completion.token_ids)] == (
        *first.prompt, *first.completion.token_ids
    )  # fmt: skip
    assert str(tokenizer.decode(first.prompt)).startswith("<user>[{")


def test_responses_stream_their_events(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, asks_for_x, max_length=600)

    async def agent(client: AsyncOpenAI, _: Any) -> None:
        async with client.responses.stream(
            model="m", input="a?", tools=[RESPONSE_TOOL], include=["message.output_text.logprobs"], top_logprobs=1
        ) as stream:
            events = [each async for each in stream]
            whole = await stream.get_final_response()
        kinds = [each.type for each in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_text.delta") > 2
        assert "response.function_call_arguments.done" in kinds
        assert [each.sequence_number for each in events] == list(range(1, len(events) + 1))
        scores = [
            score.logprob for each in events if each.type == "response.output_text.delta" for score in each.logprobs
        ]
        assert scores == list(made.completed[0].completion.logprobs)
        assert whole.output_text == "so "
        created: Any = await client.responses.create(model="m", input="cut", stream=True, max_output_tokens=2)
        last = [each async for each in created][-1]
        assert (last.type, last.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")

    play(made, agent, tool_parser=Hermes())


# Messages


def test_messages_call_tools_in_one_sequence(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, asks_for_x, max_length=600)

    async def agent(_: Any, client: AsyncAnthropic) -> None:
        common: Any = {
            "model": "claude", "max_tokens": 64, "tools": [MESSAGES_TOOL],
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        }  # fmt: skip
        first = await client.messages.create(messages=[QUESTION], **common)
        assert (first.stop_reason, first.model, first.usage.input_tokens) == ("tool_use", "claude", len(made.completed[0].prompt))  # fmt: skip  # noqa: E501
        text, use = first.content
        assert (text.type, use.type) == ("text", "tool_use")
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "2"}]}
        later: Any = [
            QUESTION, {"role": "assistant", "content": [each.model_dump() for each in first.content]},
            {"role": "user", "content": [result]},
        ]  # fmt: skip
        counted = await client.messages.count_tokens(model="claude", messages=later, tools=common["tools"], system=common["system"])  # fmt: skip  # noqa: E501
        async with client.messages.stream(messages=later, **common) as stream:
            texts = [each async for each in stream.text_stream]
            last = await stream.get_final_message()
        assert len(texts) > 1
        assert ("".join(texts), last.stop_reason) == ("done", "end_turn")
        assert last.usage.output_tokens == len(made.completed[1].completion.token_ids)
        assert abs(counted.input_tokens - len(made.completed[1].prompt)) < 10  # its history is tokenised again

    play(made, agent, tool_parser=Hermes())
    whole = one_sequence(made, tokenizer)
    assert "<user>system:be brief<user>user:a?<assistant>so " in whole
    assert whole.endswith(f"{CALL}<eos><user>tool:2<assistant>done<eos>")


def test_messages_stream_calls_of_tools(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, asks_for_x, max_length=600)

    async def agent(_: Any, client: AsyncAnthropic) -> None:
        async with client.messages.stream(
            model="m", max_tokens=64, messages=[QUESTION], tools=[MESSAGES_TOOL]
        ) as stream:
            whole = await stream.get_final_message()
        assert [block.type for block in whole.content] == ["text", "tool_use"]
        use: Any = whole.content[1]
        assert (use.name, use.input, whole.stop_reason) == ("add", {"x": 1}, "tool_use")

    play(made, agent, tool_parser=Hermes())


def test_messages_say_why_they_end(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, lambda prompt: "abcSTd")

    async def agent(_: Any, client: AsyncAnthropic) -> None:
        common: Any = {"model": "m", "messages": [QUESTION]}
        stopped = await client.messages.create(max_tokens=64, stop_sequences=["ST"], **common)
        assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("abc", "stop_sequence", "ST")
        cut = await client.messages.create(max_tokens=2, **common)
        assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("ab", "max_tokens", None)

    play(made, agent)


def test_what_models_that_reason_are_asked_has_no_effect(tokenizer: Tokenizer) -> None:
    """The default settings of command-line agents."""
    made = policy(tokenizer, lambda prompt: "a")

    async def agent(client: AsyncOpenAI, other: AsyncAnthropic) -> None:
        await client.chat.completions.create(
            model="m", messages=[QUESTION], reasoning_effort="high", verbosity="low", prompt_cache_retention="24h"
        )
        await client.responses.create(model="m", input="a?", text={"verbosity": "low"}, reasoning={"effort": "low"})
        await other.messages.create(
            model="m", max_tokens=9, messages=[QUESTION], thinking={"type": "enabled", "budget_tokens": 1024},
            extra_body={"context_management": {"edits": []}, "output_config": {"effort": "high"}},
        )  # fmt: skip

    play(made, agent)
    assert len(made.completed) == 3


def test_a_run_may_sample_whatever_a_request_asks(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, lambda prompt: "a")

    async def agent(client: AsyncOpenAI, other: AsyncAnthropic) -> None:
        await client.chat.completions.create(model="m", messages=[QUESTION], temperature=0, top_p=0.5)
        answer = await client.responses.create(model="m", input="a?", temperature=0)
        assert answer.temperature == made.temperature
        await client.completions.create(model="m", prompt="a", temperature=0)
        await other.messages.create(model="m", max_tokens=9, messages=[QUESTION], extra_body={"temperature": 0})

    play(made, agent, requests_sample=False)
    assert [call.completion.temperature for call in made.completed] == [None] * 4  # that of the run


# What is refused


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"background": True}, "background is True, which this server does not do"),
        ({"max_tool_calls": 3}, "max_tool_calls: not a parameter that this server knows"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is 'web_search'; a tool here is a function"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input[0] is 'reasoning', or has other fields"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0] is 'input_file'"),
        ({"include": ["file_search_call.results"]}, "include has 'file_search_call.results'"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format is {'type': 'grammar'}"),
        ({"previous_response_id": "resp_9"}, "this episode has no response 'resp_9'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice is {'type': 'allowed_tools'}"),
        ({"input": []}, "input is empty"),
        ({"temperature": 0}, "the request has a temperature of 0.0; replies are sampled at 0.01 to 2"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_responses_refuse_by_name(tokenizer: Tokenizer, settings: Any, problem: str, stream: bool) -> None:
    made = policy(tokenizer, lambda prompt: "a")

    async def agent(client: AsyncOpenAI, _: Any) -> None:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
            await client.responses.create(**{"model": "m", "input": "a?", "stream": stream, **settings})
        assert problem in str(refused.value.body)

    play(made, agent)
    assert made.completed == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: Input should be 'json_schema'"),
        ({"extra_body": {"top_k": 5}}, "top_k is 5, which this server does not do"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] is 'web_search_20250305'"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role is 'system'; it is user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0] is 'document'"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "a"}]}, "so there is nothing to reply to"),
        ({"extra_body": {"container": "c"}}, "container: not a parameter that this server knows"),
        ({"tools": [MESSAGES_TOOL]}, "`tools` need `environment.tool_parser` in the recipe"),
        ({"messages": [{"role": "user", "content": "a" * 250}]}, "tokens and leaves no room for a completion"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_messages_refuse_by_name(tokenizer: Tokenizer, settings: Any, problem: str, stream: bool) -> None:
    made = policy(tokenizer, lambda prompt: "a")

    async def agent(_: Any, client: AsyncAnthropic) -> None:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(
                **{"model": "m", "max_tokens": 9, "messages": [QUESTION], "stream": stream, **settings}
            )
        body: Any = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert problem in body["error"]["message"]

    play(made, agent)
    assert made.completed == []


def test_a_wrong_key_is_refused_in_the_form_of_each_api(tokenizer: Tokenizer) -> None:
    async def agent(client: AsyncOpenAI, other: AsyncAnthropic) -> None:
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="x").responses.create(model="m", input="a?")
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await other.with_options(api_key="x").messages.create(model="m", max_tokens=3, messages=[QUESTION])
        assert (await client.models.retrieve("any/model")).id == "any/model"

    play(policy(tokenizer, lambda prompt: "a"), agent)


def test_a_key_whose_bytes_are_no_text_is_refused(tokenizer: Tokenizer) -> None:
    async def agent(client: AsyncOpenAI, _: Any) -> None:
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"GET {url.path}models HTTP/1.1\r\nHost: a\r\nx-api-key: ".encode() + b"\xff\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 401 Unauthorized\r\n"
        writer.close()

    play(policy(tokenizer, lambda prompt: "a"), agent)


def test_images_of_results_are_shown_by_the_user() -> None:
    """Templates show no images in the message of a tool."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "seen"}, image]}
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}
    assert chat_messages([{"role": "user", "content": [result, {"type": "text", "text": "so?"}]}]) == [
        {"role": "tool", "tool_call_id": "c", "content": "seen"},
        {"role": "user", "content": [shown, {"type": "text", "text": "so?"}]},
    ]


def test_a_refusal_of_the_engine_ends_a_stream_with_an_error(tokenizer: Tokenizer) -> None:
    from rlhf_core.episodes.engine_queue import RefusedRequestError

    made = policy(tokenizer, lambda prompt: "a", structures=True)

    async def refuse(request: Request, *_: Any) -> Any:
        await asyncio.sleep(0.05)
        raise RefusedRequestError("no grammar")

    made._ask = refuse

    async def agent(client: AsyncOpenAI, other: AsyncAnthropic) -> None:
        with pytest.raises(openai.APIError, match="no reply of this JSON schema can be sampled: no grammar"):
            [
                each
                async for each in await client.chat.completions.create(
                    model="m", messages=[QUESTION], response_format={"type": "json_object"}, stream=True
                )
            ]
        with pytest.raises(anthropic.APIStatusError, match="no grammar"):
            async with other.messages.stream(
                model="m", max_tokens=9, messages=[QUESTION], tools=[MESSAGES_TOOL], tool_choice={"type": "any"}
            ) as stream:
                await stream.get_final_message()

    play(made, agent)
    assert made.completed == []
