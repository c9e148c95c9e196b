"""The environment in which the policy calls tools, and reads their results, until a reply has no call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pkgutil import resolve_name
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.chat.feedback import require_results_follow
from rlhf_core.config.environments.environments import ToolsEnvironment
from rlhf_core.config.environments.tools import TOOLS
from rlhf_core.contract import StageContext
from rlhf_core.environments.base import Environment, EnvironmentHost, Feedback, Reply
from rlhf_core.environments.tools.tool_calls import ToolCalls
from rlhf_core.environments.tools.toolset import EpisodeTools, Toolset
from rlhf_core.errors import RecipeError
from rlhf_core.rollout.tool_calls import ToolCallParser


class ToolHost(EnvironmentHost):
    @classmethod
    def of(cls, config: ToolsEnvironment, context: StageContext, tokenizer: Tokenizer) -> ToolHost:
        with ExitStack() as stack:
            toolsets: list[Toolset] = []
            for tool in config.tools.values():
                toolset = resolve_name(TOOLS[tool.type].implementation).of(tool, context)
                toolsets.append(stack.enter_context(closing(toolset)))
            schemas = [schema for toolset in toolsets for schema in toolset.schemas]
            require_results_follow(tokenizer, schemas)
            parser = ToolCallParser(config.parser, tokenizer, schemas, config.call_marker)
            stack.enter_context(closing(parser))
            return cls(config, toolsets, parser, stack.pop_all())
        raise AssertionError("unreachable: no context above suppresses an error")

    def __init__(
        self, config: ToolsEnvironment, toolsets: list[Toolset], parser: ToolCallParser, opened: ExitStack
    ) -> None:
        """opened: closes all of them. Raises RecipeError if two tools have one name."""
        self.name = config.type
        self.max_turns = config.max_turns
        self.tolerated_failures = config.tolerated_failures
        self.episode_seconds = config.episode_seconds
        self.parallel_episodes = config.parallel_episodes if config.runs_per_episode else None
        self.tools = [schema for toolset in toolsets for schema in toolset.schemas]
        self._config, self._toolsets, self._parser, self._opened = config, toolsets, parser, opened
        names = Counter(schema["function"]["name"] for schema in self.tools)
        if twice := [name for name, count in names.items() if count > 1]:
            opened.close()
            raise RecipeError(f"environment.tools: two tools are called `{twice[0]}`: rename one of them")

    def new(self) -> ToolEnvironment:
        return ToolEnvironment(self._config, self._parser, [(toolset, toolset.new()) for toolset in self._toolsets])

    def close(self) -> None:
        self._opened.close()


class ToolEnvironment(Environment):
    def __init__(
        self, config: ToolsEnvironment, parser: ToolCallParser, tools: list[tuple[Toolset, EpisodeTools]]
    ) -> None:
        self._parser = parser
        self._tools = [of_episode for _, of_episode in tools]
        by_name = {
            schema["function"]["name"]: episode_tools for toolset, episode_tools in tools for schema in toolset.schemas
        }
        self._calls = ToolCalls(config, by_name)

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        for tools in self._tools:
            await tools.reset(row, seed)
        return row["prompt"]

    async def step(self, reply: Reply) -> Feedback:
        if reply.is_last:
            return Feedback(done=True)  # nothing could read the results
        parsed = await self._parser.parse(reply.marked)
        return self._calls.unreadable() if parsed is None else await self._calls.results(parsed.calls)

    def close(self) -> None:
        for tools in self._tools:
            tools.close()
