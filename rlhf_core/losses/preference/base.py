"""What a preference loss is given, and what it answers."""

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
    """Log-probs of the completions of P pairs: in column 0 the chosen ones, in column 1 the rejected ones."""

    logprobs: Tensor  # (P, 2) float32, summed over the tokens of each completion
    lengths: Tensor  # (P, 2), tokens of each completion, at least 1
    reference: Tensor | None = None  # (P, 2) float32, as `logprobs`, by the reference; no gradient

    @property
    def means(self) -> Tensor:
        """(P, 2): mean log-prob of a token."""
        return self.logprobs / self.lengths


@dataclass(frozen=True)
class PreferenceLoss(ABC, Generic[C]):
    """Pure: tensors in, tensors out. Sums over the pairs of a step are the caller's."""

    config: C

    @abstractmethod
    def rewards(self, pairs: PairLogprobs) -> Tensor:
        """(P, 2): the rewards that the loss takes the policy to give, of which the chosen one should be higher."""

    @abstractmethod
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """(P,): the loss of each pair."""


class RatioLoss(PreferenceLoss[R]):
    """A loss of log-prob ratios to the reference."""

    def ratios(self, pairs: PairLogprobs) -> Tensor:
        """(P, 2): r, the log-prob of each completion less that by the reference."""
        assert pairs.reference is not None
        ratios = pairs.logprobs - pairs.reference
        return ratios / pairs.lengths if self.config.logprobs == "mean" else ratios

    def rewards(self, pairs: PairLogprobs) -> Tensor:
        return self.config.beta * self.ratios(pairs)
