"""The OpenAI API in front of a policy, asked by the real client: what is sampled is what is recorded."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.environments.agents.api.network import Network
from rlhf_core.environments.agents.api.server import PolicyServer
from rlhf_core.episodes.calls import Calls, joined
from tests.rlhf_core.environments.policies import Hermes, completed, policy, tokenizer_in

pytestmark = pytest.mark.parts

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SHOWN: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}]}
QUESTION: Any = {"role": "user", "content": "a?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("base"))


def play(made: Calls, agent: Callable[[AsyncOpenAI], Awaitable[Any]], **server: Any) -> Any:
    """What the agent returns."""

    async def episode() -> Any:
        async with (
            PolicyServer(**server).episode(made) as (base_url, key),
            AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client,
        ):
            return await agent(client)

    return asyncio.run(episode())


def chat(client: AsyncOpenAI, *messages: Any, **settings: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=list(messages), **settings)


def test_later_messages_follow_the_tokens_that_were_sampled(tokenizer: Tokenizer) -> None:
    """Also those that no text would be tokenised to again: `ab` is one word here, and is sampled as two letters."""
    made = policy(tokenizer, lambda prompt: "b" if "wrong" in prompt else "a")

    async def agent(client: AsyncOpenAI) -> None:
        first = await chat(client, QUESTION)
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("a", "stop")
        assert first.usage.completion_tokens == 2
        again = [QUESTION, first.choices[0].message.model_dump(), {"role": "user", "content": "wrong"}]
        assert (await chat(client, *again)).choices[0].message.content == "b"

    play(made, agent)
    first, second = made.completed
    assert second.prompt[: len(first.prompt) + 2] == (*first.prompt, *first.completion.token_ids)
    assert tokenizer.decode(second.prompt) == "<user>user:a?<assistant>a<eos><user>user:wrong<assistant>"
    (sequence,) = joined(made.completed)
    assert sequence.sampled.count(True) == 4


def test_a_reply_that_would_be_tokenised_otherwise_keeps_its_tokens(tokenizer: Tokenizer) -> None:
    calls = policy(tokenizer, lambda prompt: "a")
    odd = completed(tokenizer, "a")
    odd = odd.__class__((tokenizer.unk_token_id or 0, *odd.token_ids), (-0.5, *odd.logprobs), "stop", 0)

    async def ask(request: Any) -> Any:
        return odd

    calls._ask = ask

    async def agent(client: AsyncOpenAI) -> None:
        said = (await chat(client, QUESTION)).choices[0].message
        assert said.content == "a"  # a special token is none of the text
        await chat(client, QUESTION, {"role": "assistant", "content": said.content}, QUESTION)

    play(calls, agent)
    assert len(joined(calls.completed)) == 1
    assert calls.completed[1].prompt[len(calls.completed[0].prompt) :][:3] == tuple(odd.token_ids)


def test_changed_history_and_sub_agents_are_branches(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, lambda prompt: "a")

    async def agent(client: AsyncOpenAI) -> None:
        said = {"role": "assistant", "content": "a"}
        await chat(client, QUESTION)
        await chat(client, QUESTION, said, {"role": "user", "content": "one"})
        await chat(client, QUESTION, said, {"role": "user", "content": "two"})  # the same beginning
        await chat(client, QUESTION, {**said, "content": "b"}, {"role": "user", "content": "one"})  # not what was said
        await chat(client, {"role": "system", "content": "other"}, QUESTION)

    play(made, agent)
    sequences = joined(made.completed)
    assert [[call.number for call in each.calls] for each in sequences] == [[0, 1], [2], [3], [4]]
    first = made.completed[0]
    assert list(sequences[1].token_ids[: len(first.prompt) + 2]) == [*first.prompt, *first.completion.token_ids]
    assert not any(sequences[2].sampled[:-2])


def test_a_reply_that_was_cut_is_ended_before_what_follows(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, lambda prompt: "abc")

    async def agent(client: AsyncOpenAI) -> None:
        cut = (await chat(client, QUESTION, max_tokens=2)).choices[0]
        assert (cut.message.content, cut.finish_reason) == ("ab", "length")
        await chat(client, QUESTION, cut.message.model_dump(), QUESTION, stop="b")

    play(made, agent)
    (sequence,) = joined(made.completed)
    text = "<user>user:a?<assistant>ab<eos><user>user:a?<assistant>ab"  # the last was stopped
    assert tokenizer.decode(sequence.token_ids) == text
    assert tokenizer.decode([t for t, s in zip(sequence.token_ids, sequence.sampled, strict=True) if s]) == "abab"


def test_a_stream_has_what_is_recorded(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, lambda prompt: "abc")

    async def agent(client: AsyncOpenAI) -> Any:
        stream = await chat(client, QUESTION, stream=True, stream_options={"include_usage": True}, logprobs=True)
        return [chunk async for chunk in stream]

    chunks = play(made, agent)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "abc"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None] * 5 + ["stop"]
    assert chunks[-1].usage.completion_tokens == 4
    scored = [c.choices[0].logprobs.content for c in chunks if c.choices and c.choices[0].logprobs]
    logprobs = [each.logprob for content in scored for each in content]
    assert logprobs == list(made.completed[0].completion.logprobs)

    async def texts(client: AsyncOpenAI) -> Any:
        stream = await client.completions.create(model="policy", prompt="a", stream=True, logprobs=0)
        return [chunk async for chunk in stream]

    (chunk,) = play(made, texts)
    assert chunk.choices[0].text == "abc"
    assert list(chunk.choices[0].logprobs.token_logprobs) == list(made.completed[1].completion.logprobs)


def test_completions_models_and_tokenize(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, lambda prompt: f"{prompt}x")

    async def agent(client: AsyncOpenAI) -> None:
        tokens = tokenizer("ab", add_special_tokens=False)["input_ids"]
        by_text = await client.completions.create(model="policy", prompt="ab", stop=["x"])
        assert (by_text.choices[0].text, by_text.choices[0].finish_reason) == ("ab", "stop")
        by_tokens = await client.completions.create(model="policy", prompt=tokens, n=2)
        assert [choice.text for choice in by_tokens.choices] == ["abx"] * 2
        assert [model.id async for model in client.models.list()] == ["policy"]
        root = str(client.base_url).removesuffix("v1/")
        async with httpx.AsyncClient(headers=client.auth_headers) as http:
            said = (await http.post(f"{root}tokenize", json={"prompt": "ab"})).json()
            assert said == {"count": 2, "max_model_len": 200, "tokens": tokens}
            said = (await http.post(f"{root}tokenize", json={"messages": [QUESTION]})).json()
            assert tokenizer.decode(said["tokens"]) == "<user>user:a?<assistant>"
            assert (await http.post(f"{root}tokenize", json={})).status_code == 400
            assert (await http.get(f"{root}v1/files")).json()["error"]["code"] == "not_found"

    play(made, agent)
    assert [call.number for call in made.completed] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools(tokenizer: Tokenizer, stream: bool) -> None:
    calls = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    made = policy(tokenizer, lambda prompt: "a" if "tool:" in prompt else f"b{calls}")

    async def agent(client: AsyncOpenAI) -> None:
        if stream:
            chunks = [c async for c in await chat(client, QUESTION, tools=[TOOL], stream=True)]
            deltas = [chunk.choices[0].delta for chunk in chunks]
            content, reason = "".join(each.content or "" for each in deltas), chunks[-1].choices[0].finish_reason
            call, arguments = [each.tool_calls[0] for each in deltas if each.tool_calls]
            call.function.arguments += arguments.function.arguments
        else:
            choice = (await chat(client, QUESTION, tools=[TOOL])).choices[0]
            (call,), content, reason = choice.message.tool_calls, choice.message.content, choice.finish_reason
        assert (content, reason) == ("b", "tool_calls")
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"x": 1})
        function = {"name": call.function.name, "arguments": call.function.arguments}
        said = {"role": "assistant", "content": content, "tool_calls": [{"id": call.id, "type": "function", "function": function}]}  # fmt: skip  # noqa: E501
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        last = (await chat(client, QUESTION, said, result, tools=[TOOL])).choices[0]
        assert (last.message.content, last.message.tool_calls, last.finish_reason) == ("a", None, "stop")

    play(made, agent, tool_parser=Hermes())
    (sequence,) = joined(made.completed)
    assert tokenizer.decode(sequence.token_ids).endswith(f"<assistant>b{calls}<eos><user>tool:2<assistant>a<eos>")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"temperature": 0}, "the request has a temperature of 0.0; replies are sampled at 0.01 to 2"),
        ({"top_p": 0.9}, "the request has a top_p of 0.9, but this run samples from all tokens"),
        ({"logit_bias": {"3": 1}}, "logit_bias is {'3': 1}"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: Input should be less than or equal to 20"),
        ({"response_format": {"type": "json_object"}}, "is sampled from another distribution than the policy's"),
        ({"response_format": {"type": "regex"}}, "response_format is {'type': 'regex'}"),
        ({"max_tokens": 81}, "max_tokens is 81; the run samples 1 to 80"),
        ({"tools": [TOOL]}, "`tools` need `environment.tool_parser` in the recipe"),
        ({"tool_choice": "required"}, "tool_choice demands a call of a tool"),
        ({"tool_choice": "required", "tools": [TOOL]}, "is sampled from another distribution than the policy's"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is 'web_search'"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"extra_body": {"guided_json": {}}}, "guided_json: not a parameter that this server knows"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role is 'bot'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "sound"}]}]},
            "messages[0].content[0] must be of the type",
        ),
        ({"messages": [SHOWN]}, "messages[0].content[0] is an image, but the policy reads text alone"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages[0] is the assistant's, so there is nothing"),
        ({"messages": [{"role": "user", "content": "a" * 250}]}, "tokens and leaves no room for a completion"),
        ({"messages": []}, "messages: List should have at least 1 item"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_words_of_the_api(
    tokenizer: Tokenizer, settings: dict[str, Any], problem: str
) -> None:
    made = policy(tokenizer, lambda prompt: "a")

    async def agent(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(**{"model": "policy", "messages": [QUESTION], **settings})
        assert isinstance(refused.value, openai.BadRequestError | openai.NotFoundError)
        assert isinstance(refused.value.body, dict)
        assert problem in refused.value.body["message"]
        assert refused.value.body["type"] == "invalid_request_error"

    play(made, agent)
    assert made.completed == []


def test_what_changes_nothing_is_ignored(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, lambda prompt: "a")
    given = {"seed": 7, "user": "x", "temperature": 1, "top_p": 1.0, "presence_penalty": 0.0, "tool_choice": "none"}
    play(made, lambda client: chat(client, QUESTION, tools=[TOOL], **given))
    assert tokenizer.decode(made.completed[0].prompt) == "<user>user:a?<assistant>"


def test_a_temperature_is_that_of_its_reply_alone(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, lambda prompt: "a")

    async def agent(client: AsyncOpenAI) -> None:
        await chat(client, QUESTION, temperature=0.5)
        await chat(client, QUESTION)

    play(made, agent)
    assert [call.completion.temperature for call in made.completed] == [0.5, None]


def test_a_call_beyond_the_last_is_refused(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, lambda prompt: "a", turns=1)

    async def agent(client: AsyncOpenAI) -> None:
        await chat(client, QUESTION)
        with pytest.raises(openai.BadRequestError, match="all of the 1 calls") as refused:
            await chat(client, QUESTION)
        assert refused.value.code == "too_many_calls"

    play(made, agent)


def test_a_key_opens_its_own_episode_and_only_while_it_is_played(tokenizer: Tokenizer) -> None:
    async def together() -> None:
        server, one, other = PolicyServer(), policy(tokenizer, lambda _: "a"), policy(tokenizer, lambda _: "b")
        async with server.episode(one) as (url, key), server.episode(other) as (other_url, other_key):
            assert url.startswith("http://127.0.0.1:")
            for wrong_url, wrong_key in (
                (url, other_key),
                (other_url, key),
                (url, ""),
                (url.replace("episode-0", "episode-9"), key),
            ):
                with pytest.raises(openai.AuthenticationError):
                    await chat(AsyncOpenAI(base_url=wrong_url, api_key=wrong_key or "none", max_retries=0), QUESTION)
            async with server.episode(policy(tokenizer, lambda _: "c")) as over:
                pass
            with pytest.raises(openai.AuthenticationError):
                await chat(AsyncOpenAI(base_url=over[0], api_key=over[1], max_retries=0), QUESTION)
            said = await chat(AsyncOpenAI(base_url=other_url, api_key=other_key), QUESTION)
            assert said.choices[0].message.content == "b"
        assert (len(one.completed), len(other.completed)) == (0, 1)
        with pytest.raises(openai.APIConnectionError):
            await chat(AsyncOpenAI(base_url=url, api_key=key, max_retries=0), QUESTION)

    asyncio.run(together())


def test_other_machines_reach_it_by_tls_with_the_certificate_of_the_run(tokenizer: Tokenizer) -> None:
    made = policy(tokenizer, lambda prompt: "a")
    network, another = Network.of("127.0.0.2", "localhost"), Network.of("127.0.0.2", "127.0.0.2")

    async def asked(url: str, key: str, certificate: str) -> str:
        trusted = ssl.create_default_context(cadata=certificate)
        async with httpx.AsyncClient(verify=trusted, headers={"x-api-key": key}) as client:
            body = {"model": "m", "max_tokens": 9, "messages": [QUESTION]}
            answer = await client.post(f"{url}/messages", json=body)
            answer.raise_for_status()
            return str(answer.json()["content"][0]["text"])

    async def agent() -> None:
        async with PolicyServer(network=another).episode(made) as (url, key):
            assert url.startswith("https://127.0.0.2:")
            assert await asked(url, key, another.certificate) == "a"
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await asked(url, key, network.certificate)
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                await asked(url, "x", another.certificate)
            with pytest.raises(httpx.TransportError):
                await asked(url.replace("https", "http"), key, another.certificate)

    asyncio.run(agent())
    assert network.root(8).startswith("https://localhost:8")
    assert len(made.completed) == 1
