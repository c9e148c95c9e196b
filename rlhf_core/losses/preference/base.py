"""Interface of a preference loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from rlhf_core.config.stages.preference_losses import PreferenceLossConfig, ReferenceLoss

C = TypeVar("C", bound=PreferenceLossConfig)
R = TypeVar("R", bound=ReferenceLoss)


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """Log-probs of the completions of P pairs: column 0 the chosen ones, column 1 the rejected ones."""

    logprobs: Tensor  # (P, 2) float32, summed over the tokens of each completion
    lengths: Tensor  # (P, 2), tokens of each completion, at least 1
    reference: Tensor | None = None  # (P, 2) float32, as `logprobs`, by the reference; no gradient
    margins: Tensor | None = None  # (P,) float32, the `margin` of each row: how much better the chosen one is

    @property
    def means(self) -> Tensor:
        """Return the mean log-prob per token, (P, 2)."""
        return self.logprobs / self.lengths


@dataclass(frozen=True)
class PreferenceLoss(ABC, Generic[C]):
    """A pure function of tensors; the caller sums over the pairs of a step."""

    config: C

    @abstractmethod
    def rewards(self, pairs: PairLogprobs) -> Tensor:
        """Return the implicit rewards of the policy, (P, 2); the chosen one should be higher."""

    @abstractmethod
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return the loss of each pair, (P,)."""


class RatioLoss(PreferenceLoss[R]):
    """Base of losses of the log-prob ratios to the reference."""

    def ratios(self, pairs: PairLogprobs) -> Tensor:
        """Return r, the log-prob of each completion minus that under the reference, (P, 2)."""
        assert pairs.reference is not None
        ratios = pairs.logprobs - pairs.reference
        return ratios / pairs.lengths if self.config.logprobs == "mean" else ratios

    def rewards(self, pairs: PairLogprobs) -> Tensor:
        return self.config.beta * self.ratios(pairs)
