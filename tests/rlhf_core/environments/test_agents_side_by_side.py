"""500 agents of both APIs and of two frameworks at a time, half of which break a stream off: exact tokens, and nothing
left of the others.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import agents
import psutil
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.config.engines.rollout import SamplingConfig, VllmEngineConfig
from rlhf_core.environments import EnvironmentHost, Program
from rlhf_core.environments.agents.api.server import PolicyServer
from rlhf_core.environments.agents.program import Outcome, Policy
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.rollout.engine import Progress, Request, Unfinished
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.types import Completion, Prompt, Trajectory
from tests.rlhf_core.environments.policies import tokenizer_in

pytestmark = [pytest.mark.endurance("chaos")]

EPISODES = int(os.environ.get("ALIGNMENT_RANDOM_EPISODES", "500"))
LONG = 250  # letters of a reply that is broken off
Message = dict[str, Any]


class Stepping(ScriptedEngine):
    """Samples a token of each of its requests in every call, and keeps what it has sampled whole."""

    def __init__(self, script: Any) -> None:
        super().__init__(script, max_length=400)
        self.left: dict[int, tuple[Request, Completion, int]] = {}
        self.whole: list[tuple[tuple[int, ...], Completion]] = []
        self.most = 0
        self.abandoned = 0

    def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Progress]:
        for number in abandoned:
            self.abandoned += self.left.pop(number, None) is not None
        for number, request in requests.items():
            (made,) = self.generate([request])
            own = tuple(-0.001 * token - 1e-5 * len(request.prompt) for token in made.token_ids)
            self.left[number] = request, Completion(made.token_ids, own, made.finish_reason, 0), 0
        self.most = max(self.most, len(self.left))
        answers: dict[int, Progress] = {}
        for number, (request, made, count) in list(self.left.items()):
            count += 1
            self.left[number] = request, made, count
            if count == len(made.token_ids):
                del self.left[number]
                self.whole.append((tuple(request.prompt), made))
                answers[number] = made
            elif request.streams:
                answers[number] = Unfinished(made.token_ids[:count], made.logprobs[:count])
        return answers


UNTRACED = agents.RunConfig(tracing_disabled=True)


def history(messages: Sequence[Message]) -> list[ModelRequest | ModelResponse]:
    """The messages as Pydantic AI has them."""
    return [
        ModelRequest([UserPromptPart(each["content"])])
        if each["role"] == "user"
        else ModelResponse([TextPart(each["content"])])
        for each in messages
    ]


class Clients:
    """Both clients over one pool of connections."""

    def __init__(self) -> None:
        self.openai = AsyncOpenAI(base_url="http://none", api_key="none", max_retries=0, timeout=600)
        self.anthropic = AsyncAnthropic(base_url="http://none", api_key="none", max_retries=0, timeout=600)

    @asynccontextmanager
    async def stream(
        self, number: int, url: str, key: str, messages: Sequence[Message]
    ) -> AsyncIterator[AsyncIterator[str]]:
        """The texts of a reply: of chat completions, responses and messages, the OpenAI Agents SDK and Pydantic AI, by
        turns.
        """
        of_openai: Any = self.openai.with_options(base_url=url, api_key=key)
        of_anthropic: Any = self.anthropic.with_options(base_url=url.removesuffix("/v1"), api_key=key)
        match number % 5:
            case 0:
                stream = await of_openai.chat.completions.create(model="m", messages=messages, stream=True)
                async with stream:
                    yield (each.choices[0].delta.content or "" async for each in stream)
            case 1:
                stream = await of_openai.responses.create(model="m", input=messages, stream=True)
                async with stream:
                    yield (each.delta if each.type == "response.output_text.delta" else "" async for each in stream)
            case 2:
                async with of_anthropic.messages.stream(model="m", max_tokens=500, messages=messages) as stream:
                    yield stream.text_stream
            case 3:
                model = agents.OpenAIChatCompletionsModel("m", of_openai)
                running = agents.Runner.run_streamed(
                    agents.Agent("letters", model=model), list(messages), run_config=UNTRACED
                )
                try:
                    yield (
                        each.data.delta
                        async for each in running.stream_events()
                        if each.type == "raw_response_event" and each.data.type == "response.output_text.delta"
                    )
                finally:
                    running.cancel()
            case _:
                asker = PydanticAgent(AnthropicModel("m", provider=AnthropicProvider(anthropic_client=of_anthropic)))
                *before, last = messages
                async with asker.run_stream(last["content"], message_history=history(before)) as result:
                    yield result.stream_text(delta=True, debounce_by=None)

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()


class Agent(Program):
    """Asks twice. Of the odd ones the second reply is long, and they break it off once they have seen some of it."""

    def __init__(self, host: AgentHost) -> None:
        self._host = host

    async def run(self, row: Mapping[str, Any], seed: int, policy: Policy) -> Outcome:
        clients, number = self._host.opened(), seed
        async with self._host.server.episode(policy) as (url, key):
            question = {"role": "user", "content": f"n{number}."}
            async with clients.stream(number, url, key, [question]) as texts:
                first = "".join([text async for text in texts])
            assert first == f"n{number}."
            said = {"role": "assistant", "content": first}
            more = {"role": "user", "content": f"long n{number}." if number % 2 else f"m{number}."}
            async with clients.stream(number, url, key, [question, said, more]) as texts:
                shown = ""
                async for text in texts:
                    shown += text
                    if number % 2 and len(shown) > 3:
                        break
            assert shown == f"m{number}." if number % 2 == 0 else "x" * len(shown) == shown
        await self._host.played()
        return Outcome(float(number))

    def close(self) -> None:
        pass


class AgentHost(EnvironmentHost):
    name, max_turns, tolerated_failures = "agents", 5, 0.0

    def __init__(self) -> None:
        self.server = PolicyServer()
        self.clients: Clients | None = None
        self._left = EPISODES

    async def played(self) -> None:
        self._left -= 1
        if self._left == 0 and self.clients is not None:
            await self.clients.close()

    def opened(self) -> Clients:
        """Those of the event loop of the episodes."""
        self.clients = self.clients or Clients()
        return self.clients

    def new(self) -> Agent:
        return Agent(self)

    def close(self) -> None:
        pass


def engine_of(tokenizer: Tokenizer) -> Stepping:
    def script(prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        asked = str(tokenizer.decode(list(prompt))).rpartition("user:")[2].partition("<")[0]
        reply = "x" * LONG if asked.startswith("long") else asked
        return [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    return Stepping(script)


@pytest.mark.slow("all episodes run at the same time")
@pytest.mark.timeout(1800)
def test_each_keeps_its_own_exact_tokens_and_nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = tokenizer_in(tmp_path_factory.mktemp("base"))
    engine, host = engine_of(tokenizer), AgentHost()
    rollouter = Rollouter(InlineEngines(engine), tokenizer, VllmEngineConfig(max_length=400, repeatable=False), host)
    before = psutil.Process().num_fds()
    starts = [
        Start(Prompt(f"row{number}", "a", (1,), {"id": f"row{number}", "prompt": []}), lambda call: call, number)
        for number in range(EPISODES)
    ]
    trajectories = rollouter.play(starts, SamplingConfig(max_tokens=300))
    assert psutil.Process().num_fds() <= before + 2
    assert engine.left == {}
    assert engine.abandoned == EPISODES // 2
    assert engine.most > EPISODES // 4
    recorded = dict(engine.whole)
    assert len(recorded) == len(engine.whole) == EPISODES + (EPISODES + 1) // 2
    for number, trajectory in enumerate(trajectories):
        own = [f"n{number}."] if number % 2 else [f"n{number}.", f"m{number}."]
        assert trajectory.environment_reward == number
        assert (trajectory.turns, trajectory.branches) == (len(own), ())
        assert replies_of(trajectory, recorded, tokenizer) == own
        whole = tokenizer.decode(trajectory.token_ids.tolist())
        assert whole == "".join(f"<user>user:{text}<assistant>{text}<eos>" for text in own)


def replies_of(trajectory: Trajectory, recorded: Mapping[tuple[int, ...], Completion], tokenizer: Any) -> list[str]:
    """The replies that are trained, each of which must be what the engine sampled after the tokens before it."""
    tokens, mask = trajectory.token_ids.tolist(), trajectory.loss_mask.tolist()
    replies, start = [], 0
    while True in mask[start:]:
        first = mask.index(True, start)
        end = mask.index(False, first) if False in mask[first:] else len(mask)
        completion = recorded[tuple(tokens[:first])]
        assert tokens[first:end] == list(completion.token_ids)
        assert trajectory.rollout_logprobs[first:end].tolist() == list(completion.logprobs)
        replies.append(str(tokenizer.decode(tokens[first : end - 1])))
        start = end
    return replies
