"""What an algorithm is: which models it needs, how rewards become advantages, and the loss of a token."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rlhf_core.config.algorithms import AlgorithmConfig
from rlhf_core.types import Experience

Metrics = dict[str, Tensor]


class Algorithm(Protocol):
    """Pure: tensors in, tensors out; the same object lives in the driver and in every worker."""

    @property
    def config(self) -> AlgorithmConfig: ...

    @property
    def uses_critic(self) -> bool: ...

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is part of the reward, so that old log-probs must be known before the advantages."""

    def advantages(self, experience: Experience, rewards: Tensor, group_ids: Tensor) -> Experience:
        """`experience` with `advantages` (and `returns`, `rewards`) filled in.

        rewards: (S,) float32, one of each sequence; group_ids: (S,) int64, equal for completions of one prompt.
        The experience is the whole step's, over all ranks, so that statistics are global.
        """

    def policy_loss(
        self, logprobs: Tensor, entropy: Tensor | None, experience: Experience, num_tokens: int
    ) -> tuple[Tensor, Metrics]:
        """Loss () of one micro-batch as its share of the step's, and sums over tokens to be divided by num_tokens.

        logprobs: (N,) float32, differentiable; num_tokens: trained tokens of the optimizer step over all ranks.
        """
