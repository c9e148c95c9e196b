"""The contract of a rollout engine: tokens in, tokens out, and a proof of which weights it serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rlhf_core.config.base import Dtype
from rlhf_core.config.rollout import RolloutEngineConfig, SamplingConfig
from rlhf_core.config.training import LoraConfig
from rlhf_core.types import Completion


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is started with, beside the folder of the model that it serves as version 0."""

    config: RolloutEngineConfig
    dtype: Dtype
    seed: int
    lora: LoraConfig | None = None  # of the adapters that are published; none: publishes bring the whole model
    sleeps: bool = False  # it takes turns on its device with a rank


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    temperature: float  # 0: greedy
    top_p: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seeds: tuple[int, ...]  # one for each request of a call, so that a call repeats exactly; none where greedy
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0

    @classmethod
    def of(cls, config: SamplingConfig, stop_token_ids: tuple[int, ...], seeds: Sequence[int]) -> SamplingParameters:
        return cls(
            temperature=config.temperature, top_p=config.top_p, max_tokens=config.max_tokens,
            stop_token_ids=stop_token_ids, seeds=tuple(seeds), top_k=config.top_k, min_p=config.min_p,
        )  # fmt: skip

    def of_requests(self, first: int, end: int) -> SamplingParameters:
        """For the requests `first` to `end` - 1 of the call."""
        return replace(self, seeds=self.seeds[first:end])

    def request_seeds(self, count: int) -> Sequence[int | None]:
        """Of each of `count` requests, None where greedy. Raises ValueError if there are not as many seeds."""
        if self.temperature == 0:
            return [None] * count
        if len(self.seeds) != count:
            raise ValueError(f"{count} requests, but seeds for {len(self.seeds)}")
        return self.seeds


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """One weight as an engine serves it."""

    name: str  # the engine's own: a head that is tied to the embedding has one too
    published: str  # the tensor of a publish whose values it should have
    digest: str  # proof.tensor_digest of its values
    read_back: bool = True  # False: the digest is of the values that the engine was given; its layout cannot be read


class RolloutEngine(Protocol):
    """Sampling is a function of (weights, prompts, parameters): the same call gives the same completions.

    An engine that keeps nothing on a device inherits `sleep`, `wake` and `shutdown`.
    """

    def generate(self, prompts: Sequence[Sequence[int]], parameters: SamplingParameters) -> list[Completion]:
        """One completion of each prompt, in their order. A prompt that leaves no room raises ValueError."""

    def load_weights(self, folder: Path, version: int) -> None:
        """Serve the weights in `folder` (HF safetensors, or a PEFT adapter folder) as `version` from now on."""

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token t | tokens < t) at temperature 1 of every token; the first of each sequence is 0.0."""

    def served(self) -> tuple[ServedTensor, ...]:
        """Every weight that it serves, as far as it can be read back: what a publish is proven by."""

    @property
    def weight_version(self) -> int:
        """The version being served; 0 is the weights the engine was started with."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Release the device. Weights that are not kept must be loaded again before anything is sampled."""
        return None

    def wake(self) -> None:
        """Take the device back."""
        return None

    def shutdown(self) -> None:
        """Release all resources. The engine cannot be used afterwards."""
        return None
