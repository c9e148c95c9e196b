"""Episodes at resource servers of NeMo Gym: a session, the policy's calls in it, and a final reward."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.chat.feedback import require_results_follow
from rlhf_core.config.environments.environments import NemoGymEnvironment
from rlhf_core.contract import StageContext
from rlhf_core.data.nemo_gym import COLUMN, REQUEST
from rlhf_core.environments.base import Environment, EnvironmentHost, Feedback, Reply
from rlhf_core.environments.nemo_gym.resource_server import Answer, Session, Sessions
from rlhf_core.environments.nemo_gym.responses import ResponseItems
from rlhf_core.environments.tools.tool_calls import ToolCalls
from rlhf_core.environments.tools.toolset import EpisodeTools, ToolResult
from rlhf_core.errors import EpisodeError, RecipeError
from rlhf_core.rewards.servers import shown
from rlhf_core.rollout.tool_calls import ParsedReply, ToolCallParser

_GATEWAY = (502, 504)  # statuses of a proxy, if the server is unreachable


class NemoGymHost(EnvironmentHost):
    @classmethod
    def of(cls, config: NemoGymEnvironment, context: StageContext, tokenizer: Tokenizer) -> NemoGymHost:
        with ExitStack() as stack:
            parser: ToolCallParser | None = None
            if config.parser is not None:
                require_results_follow(tokenizer)
                parser = ToolCallParser(config.parser, tokenizer, [], config.call_marker)
                stack.enter_context(closing(parser))
            return cls(config, parser, stack.pop_all())
        raise AssertionError("unreachable: no context above suppresses an error")

    def __init__(self, config: NemoGymEnvironment, parser: ToolCallParser | None, opened: ExitStack) -> None:
        """opened: closes the parser. Raises RewardError if a variable that the config names is not set or not valid."""
        self.name = config.type
        self.max_turns = config.most_turns
        self.tolerated_failures = config.tolerated_failures
        self.episode_seconds = config.episode_seconds
        self._config, self._parser, self._opened = config, parser, opened
        try:
            self._sessions = Sessions(config)
        except BaseException:
            opened.close()
            raise

    def of_row(self, row: Mapping[str, Any]) -> EnvironmentHost:
        if COLUMN not in row:
            raise RecipeError(
                f"it is not a row of NeMo Gym: name its request by `columns: {{{COLUMN}: {REQUEST}}}` of the dataset"
            )
        self._config.of_row(row)
        return self

    def new(self) -> NemoGymEpisode:
        return NemoGymEpisode(self._config, self._parser, self._sessions)

    def close(self) -> None:
        self._opened.close()


class NemoGymEpisode(Environment):
    def __init__(self, config: NemoGymEnvironment, parser: ToolCallParser | None, sessions: Sessions) -> None:
        self._config, self._parser, self._sessions = config, parser, sessions
        self._session: Session
        self._row: Mapping[str, Any]
        self._calls: ToolCalls
        self._items = ResponseItems()
        self._was_cut = False

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self._row, self._session = row, self._sessions.new()
        seeded = _required(await self._session.post("seed_session", row[COLUMN]))
        if "mcp" in seeded and not row.get("tools"):
            raise EpisodeError("the resource server has its tools behind MCP, and not as paths that are called by POST")
        tools = _ServerTools(self._session)
        self._calls = ToolCalls(self._config, {tool["function"]["name"]: tools for tool in row.get("tools") or ()})
        return row["prompt"]

    async def step(self, reply: Reply) -> Feedback:
        self._was_cut = reply.was_cut
        parsed = await self._parsed(reply)
        self._items.add_reply(reply.text if parsed is None else parsed.content, parsed.calls if parsed else ())
        if reply.was_cut:
            return Feedback(done=True)
        if parsed is None:
            return self._calls.unreadable()
        # The last reply's too: the effects of calls are verified.
        feedback = await self._calls.results(parsed.calls)
        self._items.add_results(feedback.messages)
        return feedback

    async def finish(self) -> Any:
        request = self._row[COLUMN][REQUEST]
        response = self._items.response(self._row["id"], request, was_cut=self._was_cut)
        answer = await self._session.post("verify", {**self._row[COLUMN], "response": response})
        verified = _required(answer)
        reward = verified.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise EpisodeError(f"{answer.server} answered without a number as `reward`: {shown(answer.content)!r}")
        return reward

    def close(self) -> None:
        return None  # nothing is open between two requests

    async def _parsed(self, reply: Reply) -> ParsedReply | None:
        if self._parser is None or not self._row.get("tools"):
            return ParsedReply(reply.text, ())
        parsed = await self._parser.parse(reply.marked, self._row["tools"])
        return parsed if parsed is None or parsed.calls else ParsedReply(reply.text, ())


class _ServerTools(EpisodeTools):
    """Tools of a server: each is a path that receives the arguments; the response body is the result."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        return None

    async def call(self, name: str, arguments: Any) -> ToolResult:
        answer = await self._session.post(name, arguments)
        if answer.status in _GATEWAY:
            raise _refused(answer)
        # An exception of a tool is an answer with status 500, and arguments that do not fit one with 422.
        return ToolResult(answer.text(), "tool_errors" if answer.status >= 400 else None)

    def close(self) -> None:
        return None


def _required(answer: Answer) -> dict[str, Any]:
    """Return the response as a mapping. Raises EpisodeError if it is not one."""
    if not 200 <= answer.status < 300:
        raise _refused(answer)
    return answer.mapping()


def _refused(answer: Answer) -> EpisodeError:
    return EpisodeError(f"{answer.server} answered with status {answer.status}: {shown(answer.content)}")
