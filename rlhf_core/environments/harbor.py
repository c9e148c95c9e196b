"""Episodes of Harbor's task folders: commands in a runtime, and then the task's tests, which write the reward."""

from __future__ import annotations

import math
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
from rlhf_core.environments.tools.runtime_tools import RuntimeCalls, runtime_schemas
from rlhf_core.environments.tools.tool_calls import ToolCalls
from rlhf_core.errors import EpisodeError, RecipeError, reason_of
from rlhf_core.rollout.tool_calls import ToolCallParser
from rlhf_core.runtimes import Image, Runtime, RuntimeHost, open_runtimes
from rlhf_core.system.json_text import JSONTextError, parse_json

_PREPARE_SECONDS = 60.0
_PREPARE = "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier"  # what the policy may have put there
_TEXT, _JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
_SHOWN = 300  # characters of a test's output in an error


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
            raise RecipeError("it is no task of Harbor: let a source `harbor` read the task's folder")
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
        """Run the task's tests; return their reward, and metrics of the tests."""
        assert self._runtime is not None
        self._is_judged = True
        prepared = await self._runtime.run(_PREPARE, _PREPARE_SECONDS)
        if prepared.status or prepared.stopped:
            raise EpisodeError(f"its tests cannot be put in place: {prepared.output[-_SHOWN:]}")
        await self._runtime.write({f"/tests/{path}": content for path, content in self._task.tests.items()})
        seconds = min(self._config.test_seconds, self._task.test_seconds)
        ran = await self._runtime.run("bash /tests/test.sh", seconds, self._task.test_variables)
        if ran.stopped:
            return 0.0, {"tests_stopped": 1.0}  # by what the policy has left there, such as an endless loop
        reward = await self._reward()
        if reward is not None:
            return reward, {}
        if self._config.without_reward == "zero":
            return 0.0, {"tests_without_reward": 1.0}
        raise EpisodeError(
            f"its tests ended with status {ran.status} and wrote neither {_TEXT} nor {_JSON} (`without_reward: zero` "
            f"takes that for 0): {ran.output[-_SHOWN:]}"
        )

    async def _reward(self) -> float | None:
        """Return the reward that the tests have written; None if there is none."""
        assert self._runtime is not None
        if (content := await self._runtime.read(_TEXT)) is not None:
            return _number(content.decode(errors="replace").strip(), _TEXT)
        if (content := await self._runtime.read(_JSON)) is None:
            return None
        try:
            values = parse_json(content.decode())
        except (JSONTextError, UnicodeDecodeError) as error:
            raise EpisodeError(f"its tests wrote {_JSON}, which is no JSON: {reason_of(error)}") from error
        if not isinstance(values, dict) or not values:
            raise EpisodeError(f"its tests wrote {_JSON}, which is no mapping of rewards")
        name = "reward" if "reward" in values else next(iter(values))
        if name != "reward" and len(values) > 1:
            raise EpisodeError(f"its tests wrote {_JSON} with {', '.join(map(str, values))}, none of them `reward`")
        return _number(values[name], _JSON)


def _number(value: Any, path: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EpisodeError(f"its tests wrote {value!r:.80} to {path}, which is no finite number")
    return number
