"""GRPO in plain Python: a tiny model learns to repeat its prompt, on a CPU, in seconds: `python -m examples.grpo`.

What rlhf_core does with engines and ranks is done here by hand, with the same pure parts: `packing`, `losses` and
`algorithms`. Tensors and their shapes are those of rlhf_core/types.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhf_core.algorithms.grpo import GRPO
from rlhf_core.config.rl.algorithms import GRPOConfig
from rlhf_core.losses.aggregation import loss_weights
from rlhf_core.packing import pack
from rlhf_core.types import Minibatch, PackedBatch, Scored

DIGITS = 8  # the vocabulary
LENGTH = 2  # tokens of a prompt, and of a completion
PROMPTS, GROUP = 16, 8  # prompts of a step, completions of each prompt
UPDATES = 2  # optimizer steps on the completions of a step

# Rewards and optimizer are settings of a run, and not read here.
CONFIG = GRPOConfig.model_validate({
    "group_size": GROUP, "clip_low": 0.2, "clip_high": 0.2,
    "rewards": {"repeats": {"type": "function", "path": "-"}}, "optimizer": {"learning_rate": 1.0},
})  # fmt: skip


class TinyModel(nn.Module):
    """Logits (S, T, DIGITS) of the token after each of the tokens (S, T)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.recurrent(self.embedding(ids))[0])
        return logits


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor) -> Tensor:
    """(S, 2 * LENGTH): the prompts (S, LENGTH), each with a completion sampled at temperature 1."""
    ids = prompts
    for _ in range(LENGTH):
        probabilities = model(ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
    return ids


def reward(ids: Tensor) -> Tensor:
    """(S,): the share of the prompt's digits that the completion repeats in their places."""
    return (ids[:, :LENGTH] == ids[:, LENGTH:]).float().mean(1)


def token_logprobs(model: nn.Module, batch: PackedBatch) -> Tensor:
    """(N,): the log-prob of each sampled token. All sequences have the same length here, so they unpack as rows."""
    ids = batch.input_ids.view(batch.num_sequences, -1)
    logprobs = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return F.pad(logprobs, (1, 0)).flatten() * batch.loss_mask


def step(model: nn.Module, optimizer: torch.optim.Optimizer, algorithm: GRPO) -> float:
    """One step of GRPO; returns the mean reward of its completions."""
    # 1. Rollouts: a group of completions of each prompt, of which the sampled tokens are trained.
    groups = torch.arange(PROMPTS).repeat_interleave(GROUP)
    ids = sample(model, torch.randint(DIGITS, (PROMPTS, LENGTH))[groups])
    batch = pack(list(ids), [torch.arange(2 * LENGTH) >= LENGTH] * len(ids))

    # 2. Rewards, one a completion.
    rewards = reward(ids)

    # 3. Scores: the log-probs under the policy that sampled. Engine and trainer are one model here.
    with torch.no_grad():
        logprobs = token_logprobs(model, batch)
    scored = Scored(**vars(batch), rollout_logprobs=logprobs, old_logprobs=logprobs)

    # 4. Advantages: the reward minus the mean of its group, divided by the group's deviation, at each sampled token.
    trained = algorithm.advantages(scored, rewards, groups, kl_coefficient=0.0)

    # 5. Updates with the clipped loss: a mean over completions of the means over their tokens.
    weights = loss_weights(batch.loss_mask, batch.sequence_lengths, "sequence", length=LENGTH)
    minibatch = Minibatch(**vars(trained), loss_weights=weights)
    for _ in range(UPDATES):
        loss, _ = algorithm.policy_loss(token_logprobs(model, minibatch), None, minibatch, kl_coefficient=0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(rewards.mean())


def train(steps: int = 100, seed: int = 0) -> list[float]:
    """The mean reward of each step; it is printed every 20 steps."""
    torch.manual_seed(seed)
    model, algorithm = TinyModel(), GRPO(CONFIG)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rewards = []
    for number in range(steps):
        rewards.append(step(model, optimizer, algorithm))
        if number % 20 == 0 or number == steps - 1:
            print(f"step {number:3d}  mean reward {rewards[-1]:.3f}", flush=True)
    return rewards


if __name__ == "__main__":
    train()
