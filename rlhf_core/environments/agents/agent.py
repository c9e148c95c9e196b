"""Agents of the user's Python file: functions that play an episode with any client of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.config.environments.environments import AgentEnvironment
from rlhf_core.contract import StageContext
from rlhf_core.environments.agents.api.network import Network
from rlhf_core.environments.agents.api.server import PolicyServer
from rlhf_core.environments.agents.hosted_program import ProcessProgram, ProgramHost
from rlhf_core.environments.agents.program import Outcome, Policy, outcome_of
from rlhf_core.processes.hosting import EpisodeProcess
from rlhf_core.rollout.tool_calls import ToolCallParser
from rlhf_core.system.network import own_address


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
        self._parser = None if name is None else ToolCallParser(name, tokenizer, [], needs_marker=False)
        reached = config.network
        self.network = None if reached is None else Network.of(reached.listen, reached.host or own_address())
        self.server = PolicyServer(self._parser, self.network, requests_sample=config.sampling == "request")

    def close(self) -> None:
        super().close()
        if self._parser is not None:
            self._parser.close()

    def new(self) -> Agent:
        return Agent(self)


class Agent(ProcessProgram):
    def __init__(self, agents: AgentHost) -> None:
        super().__init__(agents)
        self._server, self._network = agents.server, agents.network

    async def _play(self, process: EpisodeProcess, row: Mapping[str, Any], seed: int, policy: Policy) -> Outcome:
        async with self._server.episode(policy) as (base_url, key):
            arguments = {"row": dict(row), "base_url": base_url, "api_key": key}
            if self._network is not None:
                arguments["certificate"] = self._network.certificate
            await process.send({"agent": arguments, "seed": seed})
            return outcome_of(await process.value(), ("reward", "score", "metrics"))
