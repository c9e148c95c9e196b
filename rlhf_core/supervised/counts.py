"""Counts of what supervised training has trained on, compared at its end with its settings and data."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.config.stages.trained import SupervisedConfig
from rlhf_core.supervised.schedule import shuffled
from rlhf_core.training.counts import require_counts
from rlhf_core.training.metrics import StepMetrics


@dataclass
class TrainedCounts:
    """Counts of all attempts of a run. Implements checkpointing.DriverState."""

    examples: int = 0
    checksum: int = 0  # of their numbers
    given_tokens: int = 0  # to be trained, of these examples
    trained_tokens: int = 0  # that these have trained, over all replicas

    def add(self, indices: Sequence[int], given_tokens: int) -> None:
        """Count the examples of a step, and the tokens that they train."""
        self.examples += len(indices)
        self.checksum += _checksum(indices)
        self.given_tokens += given_tokens

    def add_steps(self, steps: Sequence[StepMetrics]) -> None:
        """Count the tokens of steps that the ranks have taken."""
        self.trained_tokens += sum(step.num_tokens for step in steps)

    def proven(self, config: SupervisedConfig, num_examples: int, seed: int, steps: int) -> dict[str, float]:
        """Return the counts as metrics. steps: that the ranks' optimizer has taken.

        Raises StageError unless every epoch had every example once, and the ranks have trained all of it.
        """
        total = config.count_steps(num_examples)
        examples, checksum = _expected(config, num_examples, seed, total)
        require_counts({
            "steps": (total, steps),
            "examples trained": (examples, self.examples),
            "as the sum of CRCs of the examples trained": (checksum, self.checksum),
            "tokens trained": (self.given_tokens, self.trained_tokens),
        })  # fmt: skip
        return {
            "examples_trained": self.examples,
            "epochs_trained": self.examples / num_examples,
            "tokens_trained": self.trained_tokens,
        }

    def begin_at(self, config: SupervisedConfig, num_examples: int, seed: int, step: int) -> None:
        """Take what was trained before `step` as given, if the checkpoint is of a release that did not count."""
        if step and not self.examples:
            print("the checkpoint has no counts: those of the steps before it are not proven", flush=True)
            self.examples, self.checksum = _expected(config, num_examples, seed, step)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _expected(config: SupervisedConfig, num_examples: int, seed: int, steps: int) -> tuple[int, int]:
    """Return number and checksum of the examples of the first `steps` steps."""
    epochs, left = divmod(steps, config.steps_of_epoch(num_examples))
    begun = shuffled(num_examples, seed=seed, name=f"epoch {epochs}")[: left * config.batch_size]
    return epochs * num_examples + len(begun), epochs * _checksum(range(num_examples)) + _checksum(begun)


def _checksum(indices: Iterable[int]) -> int:
    """Return a sum that differs, but by chance, if an example is there twice or in place of another."""
    return sum(zlib.crc32(index.to_bytes(8, "little")) for index in indices)
