"""Episodes of Harbor's task folders: commands in a runtime, and then the task's tests, which write the reward."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.chat.feedback import require_results_follow
from rlhf_core.config.environments.environments import HarborEnvironment
from rlhf_core.config.environments.harbor import COLUMN, HarborTask
from rlhf_core.contract import StageContext
from rlhf_core.environments.base import Environment, EnvironmentHost, Feedback, Reply
from rlhf_core.environments.harbor_tests import graded
from rlhf_core.environments.tools.runtime_tools import RuntimeCalls, runtime_schemas
from rlhf_core.environments.tools.tool_calls import ToolCalls
from rlhf_core.errors import RecipeError
from rlhf_core.rollout.tool_calls import ToolCallParser
from rlhf_core.runtimes import Image, Runtime, RuntimeHost, open_runtimes


class HarborHost(EnvironmentHost):
    @classmethod
    def of(cls, config: HarborEnvironment, context: StageContext, tokenizer: Tokenizer) -> HarborHost:
        with ExitStack() as stack:
            schemas = runtime_schemas(edits=config.edits)
            require_results_follow(tokenizer, schemas)
            runtimes = stack.enter_context(closing(open_runtimes(config.runtime)))
            parser = ToolCallParser(config.parser, tokenizer, schemas, config.call_marker)
            stack.enter_context(closing(parser))
            return cls(config, runtimes, parser, stack.pop_all())
        raise AssertionError("unreachable: no context above suppresses an error")

    def __init__(
        self, config: HarborEnvironment, runtimes: RuntimeHost, parser: ToolCallParser, opened: ExitStack
    ) -> None:
        """opened: closes both of them."""
        self.name = config.type
        self.max_turns = config.max_turns
        self.tolerated_failures = config.tolerated_failures
        self.episode_seconds = config.episode_seconds
        self.parallel_episodes = config.parallel_episodes
        self.tools = runtime_schemas(edits=config.edits)
        self._config, self._runtimes, self._parser, self._opened = config, runtimes, parser, opened

    def of_row(self, row: Mapping[str, Any]) -> EnvironmentHost:
        if COLUMN not in row:
            raise RecipeError("it is not a task of Harbor: let a source `harbor` read the task's folder")
        self._config.of_row(row)
        return self

    def new(self) -> HarborEpisode:
        return HarborEpisode(self._config, self._runtimes, self._parser)

    def close(self) -> None:
        self._opened.close()


class HarborEpisode(Environment):
    def __init__(self, config: HarborEnvironment, runtimes: RuntimeHost, parser: ToolCallParser) -> None:
        self._config, self._runtimes, self._parser = config, runtimes, parser
        self._task: HarborTask
        self._calls: ToolCalls
        self._runtime: Runtime | None = None
        self._is_judged = False

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self._task = task = HarborTask.of(row[COLUMN])
        self._runtime = await self._runtimes.start(Image(task.image, task.environment, task.variables))
        calls = RuntimeCalls(self._runtime, self._config.command_seconds)
        names = [schema["function"]["name"] for schema in runtime_schemas(edits=self._config.edits)]
        self._calls = ToolCalls(self._config, dict.fromkeys(names, calls))
        return row["prompt"]

    async def step(self, reply: Reply) -> Feedback:
        """Run the calls of a reply, also of the last one: their effects are tested."""
        parsed = None if reply.was_cut else await self._parser.parse(reply.marked)
        if reply.was_cut:
            feedback = Feedback(done=True)
        elif parsed is None:
            feedback = self._calls.unreadable()
        else:
            feedback = await self._calls.results(parsed.calls)
        if not (feedback.done or reply.is_last):
            return feedback
        reward, metrics = await self._judged()
        return replace(feedback, reward=reward, metrics={**feedback.metrics, **metrics}, done=True)

    async def finish(self) -> float:
        """Return the reward of an episode that ended for want of room."""
        return 0.0 if self._is_judged else (await self._judged())[0]

    def close(self) -> None:
        if self._runtime is not None:
            self._runtime.stop()

    async def _judged(self) -> tuple[float, Mapping[str, float]]:
        assert self._runtime is not None
        self._is_judged = True
        return await graded(self._runtime, self._task, self._config)
