"""The tokens of an episode while it is played, as arrays: 9 bytes a token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlhf_core.kept_tokens import KeptTokens
from rlhf_core.types import Completion


@dataclass(slots=True)
class EpisodeTokens:
    """Tokens that are given, such as those of a prompt, and sampled ones with their log-probs, one after the other."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    sampled: bytearray = field(default_factory=bytearray)  # of each token, 1 if the policy sampled it
    logprobs: array[float] = field(default_factory=lambda: array("f"))  # of each token, 0 if it is given
    kept_parts: list[KeptTokens] = field(default_factory=list)  # of the tokens so far, if sampling is truncated
    temperature_parts: list[tuple[int, float]] = field(default_factory=list)  # tokens, and as Trajectory.temperatures

    def add_given(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.sampled.extend(bytes(len(token_ids)))
        self.logprobs.frombytes(bytes(self.logprobs.itemsize * len(token_ids)))
        self.kept_parts.append(KeptTokens.nowhere(len(token_ids)))
        self.temperature_parts.append((len(token_ids), 0.0))

    def add_sampled(self, completion: Completion) -> None:
        self.token_ids.extend(completion.token_ids)
        self.sampled.extend(b"\1" * len(completion.token_ids))
        self.logprobs.extend(completion.logprobs)
        self.kept_parts.append(completion.kept or KeptTokens.nowhere(len(completion.token_ids)))
        self.temperature_parts.append((len(completion.token_ids), completion.temperature or 0.0))

    @property
    def kept(self) -> KeptTokens | None:
        """The tokens that truncated sampling kept at each; None if no reply has any."""
        return KeptTokens.joined(self.kept_parts) if any(part.token_ids for part in self.kept_parts) else None

    @property
    def temperatures(self) -> Tensor | None:
        """The temperature at each token, as Trajectory.temperatures; None if all replies have that of the run."""
        if not any(temperature for _, temperature in self.temperature_parts):
            return None
        counts, temperatures = zip(*self.temperature_parts, strict=True)
        return torch.tensor(temperatures, dtype=torch.float32).repeat_interleave(torch.tensor(counts))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens (T,) int64, the loss mask (T,) bool, and the engine's log-probs (T,) float32."""
        arrays = np.asarray(self.token_ids), np.asarray(self.sampled, dtype=bool), np.asarray(self.logprobs)
        token_ids, sampled, logprobs = map(torch.tensor, arrays)
        return token_ids.long(), sampled, logprobs
