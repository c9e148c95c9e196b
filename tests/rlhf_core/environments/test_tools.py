"""Episodes with tools, with vLLM's parser: calls are made, and what is wrong with one is what the policy reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.chat.templates import SHIPPED
from rlhf_core.config.engines.rollout import SamplingConfig, VllmEngineConfig
from rlhf_core.config.environments.environments import ToolsEnvironment
from rlhf_core.config.environments.tools import FunctionTool
from rlhf_core.contract import StageContext
from rlhf_core.data.prompts import to_prompts
from rlhf_core.environments import Feedback, Reply, open_environments, rows_to_play
from rlhf_core.environments.function import FunctionTools
from rlhf_core.environments.tools.tools import ToolHost
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.errors import EpisodeError, RecipeError, StageError
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.rollout.tool_calls import ParsedReply, ToolCallParser
from tests.rlhf_core.chat.families import TURNS, byte_level
from tests.rlhf_core.stages.supervised_runs import context_of

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("forked")]

FILE = Path(__file__).with_name("tool_functions.py")
CHATML = byte_level(SHIPPED["chatml"].text)
CODER = byte_level(SHIPPED["chatml"].text)
CODER.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)  # which that parser looks for
ROW = {"id": "row", "prompt": [{"role": "user", "content": "a?"}], "answer": "b"}
SETTINGS = {
    "type": "tools", "parser": "hermes", "max_turns": 6, "max_malformed_replies": 2, "max_result_characters": 60,
    "tools": {
        "python": {"type": "python", "timeout_seconds": 20},
        "shop": {"type": "function", "path": FILE.name, "function": "Shop", "options": {"price": 3}},
    },
}  # fmt: skip


def context(folder: Path) -> StageContext:
    return replace(context_of(folder, {}), user_files_root=FILE.parent)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolHost]:
    config = ToolsEnvironment.model_validate(SETTINGS)
    with open_environments(config, context(tmp_path_factory.mktemp("work")), CHATML) as environments:
        assert isinstance(environments, ToolHost)
        yield environments


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(tools: ToolHost, *replies: str) -> list[Feedback]:
    async def play() -> list[Feedback]:
        with closing(tools.new()) as episode:
            await episode.reset(ROW, 0)
            return [await episode.step(Reply(reply, reply)) for reply in replies]

    return asyncio.run(play())


@pytest.mark.slow("a process imports vLLM's parsers")
def test_the_schemas_of_all_tools(tools: ToolHost) -> None:
    functions = {schema["function"]["name"]: schema["function"] for schema in tools.tools}
    assert list(functions) == ["python", "hang", "put", "total"]
    assert functions["put"] == {
        "name": "put",
        "description": "Puts a thing into the basket.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "thing": {"type": "string"},
                "kind": {"type": "string", "enum": ["new", "used"], "default": "new"},
            },
            "required": ["thing"],
        },
    }


def test_an_episode_ends_with_the_first_reply_without_a_call(tools: ToolHost) -> None:
    first, second, last = played(
        tools,
        f"Let me see. {call('python', code='2 * 21')}",
        call("put", thing="pen") + call("total"),
        "It costs 6.",
    )
    assert first == Feedback([{"role": "tool", "name": "python", "content": "42"}], metrics={"tool_calls": 1})
    assert [message["content"] for message in second.messages] == ["new pen", '{"things": ["b", "pen"], "costs": 6}']
    assert (second.done, second.metrics) == (False, {"tool_calls": 2})
    assert (last.messages, last.done, last.metrics) == ([], True, {})


@pytest.mark.parametrize(
    ("reply", "text", "counted"),
    [
        (
            call("pyton", code="1"),
            "Error: there is no tool 'pyton'; there are python, hang, put, total",
            "unknown_tools",
        ),
        (call("put", thing=3), "Error: wrong arguments: `thing`: Input should be a valid string", "wrong_arguments"),
        (call("put"), "Error: wrong arguments: `thing`: Field required", "wrong_arguments"),
        (call("total", x=1), "Error: wrong arguments: `x`: Extra inputs are not permitted", "wrong_arguments"),
        (call("python", text="1"), "Error: the arguments must be {code: text}", "wrong_arguments"),
        (call("put", thing="bomb"), "Error: ValueError: not sold here", "tool_errors"),
        (call("python", code="1 +"), '  File "<code>", line 1\n', "tool_errors"),
        (call("put", thing="x" * 99), "new " + "x" * 56 + "\n[cut: 103 characters]", None),
    ],
)
def test_what_is_wrong_with_a_call_is_its_result(tools: ToolHost, reply: str, text: str, counted: str | None) -> None:
    (feedback,) = played(tools, reply)
    assert feedback.messages[0]["content"].startswith(text[: 60 if counted else None])
    assert feedback.metrics == {"tool_calls": 1} | ({counted: 1} if counted else {})
    assert not feedback.done


def test_malformed_replies_are_told_and_the_last_one_ends_the_episode(tools: ToolHost) -> None:
    first, call_between, second = played(tools, "<tool_call>{oops</tool_call>", call("total"), "<tool_call>nothing")
    assert first == Feedback(
        [{"role": "tool", "content": "Error: this call cannot be read"}], metrics={"malformed_replies": 1}
    )
    assert not call_between.done
    assert (second.done, second.metrics) == (True, {"malformed_replies": 1})


def test_a_reply_that_nothing_can_follow_is_not_run(tools: ToolHost) -> None:
    async def play() -> list[Any]:
        with closing(tools.new()) as episode:
            await episode.reset(ROW, 0)
            told = await episode.step(Reply(call("put", thing="pen"), call("put", thing="pen"), is_last=True))
            return [told, await episode.step(Reply(call("total"), call("total")))]

    last, total = asyncio.run(play())
    assert last == Feedback(done=True)
    assert total.messages[0]["content"] == '{"things": ["b"], "costs": 3}'


def test_only_what_the_policy_sampled_is_trained(tools: ToolHost) -> None:
    """Through the rollouter: calls, results and masks as tokens."""
    eos = CHATML.convert_tokens_to_ids("<|im_end|>")
    says = [call("python", code="3 * 4"), call("put", thing="pen"), "12"]

    def script(prompt: Any, seed: int | None) -> list[int]:
        turn = CHATML.decode(list(prompt)).count("<|im_start|>tool")
        return [*CHATML(says[turn], add_special_tokens=False)["input_ids"], eos]

    (row,) = rows_to_play([ROW], tools)
    (prompt,) = to_prompts([row], CHATML, max_tokens=4000)
    assert '"name": "put"' in CHATML.decode(prompt.token_ids)
    config = VllmEngineConfig(max_length=6000)
    rollouter = Rollouter(InlineEngines(ScriptedEngine(script, max_length=6000)), CHATML, config, tools)
    (made,) = rollouter.play([Start(prompt, lambda turn: turn)], SamplingConfig(temperature=1.0, max_tokens=200))
    assert CHATML.decode(made.token_ids[made.loss_mask]) == "".join(f"{text}<|im_end|>" for text in says)
    untrained = CHATML.decode(made.token_ids[~made.loss_mask][len(prompt.token_ids) :])
    assert untrained == "".join(
        f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n" for result in ("12", "new pen")
    )
    assert torch.equal(made.rollout_logprobs != 0, made.loss_mask)
    assert (made.completion, made.turns, dict(made.environment_metrics)) == ("12", 3, {"tool_calls": 2})
    with pytest.raises(StageError, match="row row has `tools`, but its environment tools gives the policy its own"):
        list(rows_to_play([{**ROW, "tools": tools.tools}], tools))


@pytest.mark.slow("a process imports vLLM's parsers")
def test_calls_are_read_by_the_schemas_of_a_row() -> None:
    """Where the format has no types, as that of qwen3_coder, these are the schema's."""
    written = "<tool_call>\n<function=add>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>"

    def schema(kind: str) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"x": {"type": kind}}}
        return {"type": "function", "function": {"name": "add", "parameters": parameters}}

    with closing(ToolCallParser("qwen3_coder", CODER, [schema("string")], "<function=")) as parser:

        async def read() -> list[ParsedReply | None]:
            return [await parser.parse(written, tools) for tools in (None, [schema("integer")], None)]

        arguments = [each.calls[0].arguments for each in asyncio.run(read()) if each is not None]
    assert arguments == [{"x": "7"}, {"x": 7}, {"x": "7"}]


def test_a_tool_that_hangs_fails_its_episode(tmp_path: Path) -> None:
    shop = FunctionTool(type="function", path=FILE.name, function="Shop", options={"price": 1}, timeout_seconds=0.5)

    async def call_it() -> None:
        with closing(FunctionTools(shop, FILE)) as toolset, closing(toolset.new()) as episode:
            await episode.reset(ROW, 0)
            await episode.call("hang", {})

    with pytest.raises(EpisodeError, match=r"it did not return within 0.5 s and was stopped"):
        asyncio.run(call_it())


@pytest.mark.parametrize(
    ("function", "options", "problem"),
    [
        ("without_docstring", {}, r"without_docstring has no docstring: it tells the policy what the tool does"),
        ("without_type", {}, r"without_type: its parameter `a` has no type, which the policy needs to know"),
        ("of_any_arguments", {}, r"of_any_arguments takes `\*a`: a tool is called with arguments by their names"),
        ("Nothing", {}, r"Nothing has no public method beside `reset`"),
        ("add", {"a": 1}, r"add: `options` are for a class, and this is a function"),
        ("Shop", {}, r"Shop must take its options \[\], by these names: missing a required argument: 'price'"),
    ],
)
def test_what_is_no_tool_is_refused(function: str, options: dict[str, Any], problem: str) -> None:
    config = FunctionTool(type="function", path=FILE.name, function=function, options=options)
    with pytest.raises(RecipeError, match=problem):
        FunctionTools(config, FILE)


@pytest.mark.slow("a process imports vLLM's parsers")
def test_what_does_not_fit_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    def opened(tokenizer: Any = CHATML, **changes: Any) -> None:
        given = {**SETTINGS, "tools": {"shop": SETTINGS["tools"]["shop"]}, **changes}  # type: ignore[index]
        with open_environments(ToolsEnvironment.model_validate(given), context(tmp_path), tokenizer):
            pass

    with pytest.raises(StageError, match="the chat template does not write `tools`"):
        opened(byte_level(TURNS))
    with pytest.raises(RecipeError, match=r"environment.tools: two tools are called `python`"):
        opened(tools={"one": {"type": "python"}, "two": {"type": "python"}})
    with pytest.raises(StageError, match=r"vLLM has no tool parser 'hermse' \(did you mean `hermes`\?\)"):
        opened(parser="hermse")
