"""Agents of all APIs on a real engine: what is trained has the log-probs that transformers computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.engines.rollout import SamplingConfig, VllmEngineConfig
from rlhf_core.config.stages.base_model import BaseModelConfig, ScratchModel
from rlhf_core.environments import EnvironmentHost, Program
from rlhf_core.environments.agents.api.server import PolicyServer
from rlhf_core.environments.agents.program import Outcome, Policy
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.child_engine import ChildEngine
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.stages import base
from rlhf_core.types import Prompt
from tests.rlhf_core.environments.policies import TEMPLATE
from tests.rlhf_core.rollout.models import expected_logprobs
from tests.rlhf_core.stages.context import LocalContext

pytestmark = pytest.mark.parts

SCHEMA = {
    "type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False
}  # fmt: skip
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}}  # fmt: skip  # noqa: E501
EPISODES = 6


class Agent(Program):
    """A streamed reply, one of a schema after it, a tool that must be called, and one more: of all three APIs."""

    def __init__(self, server: PolicyServer) -> None:
        self._server = server

    async def run(self, row: Mapping[str, Any], seed: int, policy: Policy) -> Outcome:
        async with (
            self._server.episode(policy) as (url, key),
            AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
            AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as other,
        ):
            question: Any = {"role": "user", "content": f"question {seed}"}
            stream = await client.chat.completions.create(
                model="m", messages=[question], stream=True, max_tokens=30, logprobs=True, top_logprobs=3
            )
            said, scores = "", []
            async for chunk in stream:
                said += chunk.choices[0].delta.content or ""
                scores += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
            assert all(len(each.top_logprobs) == 3 for each in scores)
            history: Any = [question, {"role": "assistant", "content": said}, {"role": "user", "content": "now"}]
            form: Any = {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA}}
            whole = await client.responses.create(model="m", input=history, text=form)
            assert json.loads(whole.output_text)["a"] in ("x", "y")
            history += [{"role": "assistant", "content": whole.output_text}, {"role": "user", "content": "go on"}]
            must: Any = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
            tools: Any = [TOOL]
            called = await other.messages.create(
                model="m", max_tokens=200, messages=[question], tools=tools, tool_choice=must
            )
            (use,) = called.content
            assert use.type == "tool_use"
            assert use.input in ({"n": 1}, {"n": 2})
            async with other.messages.stream(model="m", max_tokens=20, messages=history) as events:
                last = await events.get_final_message()
            assert last.usage.output_tokens <= 20
        return Outcome(1.0)

    def close(self) -> None:
        pass


class Host(EnvironmentHost):
    name, max_turns, tolerated_failures = "agents", 8, 0.0

    def __init__(self) -> None:
        self._server = PolicyServer()

    def new(self) -> Agent:
        return Agent(self._server)

    def close(self) -> None:
        pass


def test_what_is_trained_has_the_policys_log_probs(
    engine_process: ChildProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    source = ScratchModel(
        type="scratch", words=(), hidden_size=64, intermediate_size=64, layers=2, heads=2, context_length=512
    )
    made = base.run(BaseModelConfig(source=source, dtype="float32"), {}, LocalContext(folder, given_seed=0)).folder
    tokenizer = load_tokenizer(made)
    tokenizer.chat_template = TEMPLATE
    config = VllmEngineConfig(
        max_length=500, cpu_cache_gib=0.05, max_sequences=16, structured_output=True, repeatable=False
    )
    engine = ChildEngine(engine_process, made, EngineSettings(config, "float32", seed=0))
    starts = [
        Start(Prompt(f"row{n}", "a", (1,), {"id": f"row{n}", "prompt": []}), lambda call, n=n: 100 * n + call, n)
        for n in range(EPISODES)
    ]
    trajectories = Rollouter(engine, tokenizer, config, Host()).play(starts, SamplingConfig(max_tokens=200))
    engine.shutdown()
    model = AutoModelForCausalLM.from_pretrained(made).eval()
    for number, trajectory in enumerate(trajectories):
        assert trajectory.environment_metrics == {"untrained_replies": 2.0}
        assert (trajectory.turns, trajectory.branches) == (2, ())
        text = str(tokenizer.decode(trajectory.token_ids.tolist()))
        assert text.startswith(f"<user>user:question {number}<assistant>")
        assert "<assistant>{" in text  # the reply of the schema, in the context of the last one
        (expected,) = expected_logprobs(model, [trajectory.token_ids.tolist()])
        mask = trajectory.loss_mask.tolist()
        sampled = [each for each, trained in zip(trajectory.rollout_logprobs.tolist(), mask, strict=True) if trained]
        policys = [each for each, trained in zip(expected, mask, strict=True) if trained]
        assert sampled == pytest.approx(policys, abs=1e-4)
