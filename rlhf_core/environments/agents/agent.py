"""Agents of the user's Python file: functions that play an episode with any client of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.config.environments.environments import AgentEnvironment
from rlhf_core.contract import StageContext
from rlhf_core.environments.agents.hosted_program import ProcessProgram, ProgramHost
from rlhf_core.environments.agents.openai_server import OpenAIServer
from rlhf_core.environments.agents.program import Outcome, Policy, outcome_of
from rlhf_core.processes.hosting import EpisodeProcess
from rlhf_core.rollout.tool_calls import ToolCallParser


class AgentHost(ProgramHost):
    @classmethod
    def of(cls, config: AgentEnvironment, context: StageContext, tokenizer: Tokenizer) -> AgentHost:
        return cls(config, context.user_file(config.path), tokenizer)

    def __init__(self, config: AgentEnvironment, file: Path, tokenizer: Tokenizer) -> None:
        """Load the file.

        Raises RecipeError, StageError or RewardError if it fails, or the model's tool calls have no parser.
        """
        super().__init__(config, file)
        name = config.tool_parser
        self._parser = None if name is None else ToolCallParser(name, tokenizer, [])
        self.server = OpenAIServer(self._parser)

    def close(self) -> None:
        super().close()
        if self._parser is not None:
            self._parser.close()

    def new(self) -> Agent:
        return Agent(self)


class Agent(ProcessProgram):
    def __init__(self, agents: AgentHost) -> None:
        super().__init__(agents)
        self._server = agents.server

    async def _play(self, process: EpisodeProcess, row: Mapping[str, Any], seed: int, policy: Policy) -> Outcome:
        async with self._server.episode(policy) as (base_url, key):
            arguments = {"row": dict(row), "base_url": base_url, "api_key": key}
            await process.send({"agent": arguments, "seed": seed})
            return outcome_of(await process.value(), ("reward",))
