"""For `--train.agent_func_path`: a letter is guessed, in three turns at most."""

from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

MAX_STEPS = 3


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        self.step_idx = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        self.step_idx += 1
        assert states["observation_text"].endswith("<assistant>")
        right = states["label"] in states["action_text"]
        done = right or self.step_idx >= MAX_STEPS
        reward = torch.tensor(1.0) if right else torch.tensor(-0.25)
        return {
            "rewards": reward,
            "scores": reward.clamp(0, 1),
            "environment_feedback": "<user>user:right" if done else "<user>user:no<assistant>",
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"steps": torch.tensor(float(self.step_idx))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)


class Cooler(AgentInstance):
    """Wants another temperature from its second turn on."""

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        answer = await super().step(states, **kwargs)
        answer["sampling_params"].temperature = 0.1
        return answer


class Penalising(AgentInstance):
    """Wants a distribution that is not the policy's."""

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        answer = await super().step(states, **kwargs)
        answer["sampling_params"].repetition_penalty = 1.1
        return answer
