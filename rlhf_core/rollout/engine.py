"""The interface of a rollout engine: tokens in, tokens out, and a proof of the weights it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

from rlhf_core.config.base import Dtype
from rlhf_core.config.engines.rollout import ENGINES, RolloutEngineConfig, SamplingConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.rollout.transport.base import Transport, WeightManifest
from rlhf_core.system.threads import use_threads
from rlhf_core.types import Completion

MOST_TOP_LOGPROBS = 20  # of a request: as in OpenAI's API, and by default in vLLM


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine, besides the folder of the model that it serves as version 0."""

    config: RolloutEngineConfig
    dtype: Dtype
    seed: int
    lora: LoraConfig | None = None  # of the published adapters; None: full models are published
    sleeps: bool = False  # it shares its device with a rank, in turns
    kept_of: SamplingConfig | None = None  # truncated sampling whose kept tokens are returned with each token


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    temperature: float  # 0: greedy
    top_p: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    stop: tuple[str, ...] = ()  # texts; engines may sample on, since episodes cut a reply after the first

    @classmethod
    def of(cls, config: SamplingConfig, stop_token_ids: tuple[int, ...]) -> SamplingParameters:
        return cls(
            temperature=config.temperature, top_p=config.top_p, max_tokens=config.max_tokens,
            stop_token_ids=stop_token_ids, top_k=config.top_k, min_p=config.min_p, stop=tuple(config.stop),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RequestImage:
    content: bytes  # of the file
    start: int  # index of its first token in the prompt
    length: int  # tokens, including the markers around it
    written: tuple[int, ...] = ()  # tokens to send in place of these; empty: the placeholder of an image


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one completion. Raises ValueError unless it has a seed exactly if it is not greedy."""

    prompt: Sequence[int]  # tokens
    parameters: SamplingParameters
    seed: int | None  # makes sampling reproducible; None if greedy
    images: Sequence[RequestImage] = ()  # of the prompt, in order
    structure: str | None = None  # JSON schema that the completion must have: only tokens that allow it are sampled
    top_logprobs: int = 0  # the likeliest tokens at each place, whose log-probs are returned too
    streams: bool = False  # `advance` also returns the tokens so far

    def __post_init__(self) -> None:
        if (self.seed is None) != (self.parameters.temperature == 0):
            raise ValueError(f"temperature {self.parameters.temperature:g} with the seed {self.seed}")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The tokens sampled so far for a request that streams."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[Mapping[int, float]] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a request whose structure the engine cannot sample."""

    reason: str


Progress = Completion | Unfinished | Refused


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """One weight as an engine serves it."""

    name: str  # in the engine, where a head tied to the embedding has its own
    published: str  # the published tensor that it should equal
    digest: str  # digest.tensor_digest of its values
    read_back: bool = True  # False: the layout cannot be read; the digest is of the received values
    rank: int | None = None  # of the engine's worker that serves this digest, if its others serve another


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The answer of one engine to a probe, from which its weights are verified."""

    version: int
    logprobs: list[list[float]]
    served: tuple[ServedTensor, ...] = ()


class RolloutEngine(Protocol):
    """An engine whose `generate` is a deterministic function of (weights, requests).

    An engine without caches or a device inherits `forget`, `sleep`, `wake` and `shutdown`.
    """

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        """Return the completion of each request, in order. Raises ValueError for a prompt that leaves no room.

        keep_prefixes: reuse the cached prefixes of earlier calls. Results then differ in the last bits, and depend on
        all calls since the last one without it.
        """

    def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> Mapping[int, Progress]:
        """Add requests, by numbers chosen by the caller, sample, and return the completions that are finished.

        abandoned: earlier requests to cancel; a no-op for finished ones. Returns as soon as a completion is finished,
        or shortly without one, so that more requests can be added; with what there is so far of those that stream.
        Not reproducible to the bit.
        """
        return dict(zip(requests, self.generate(list(requests.values())), strict=True))

    def abandon(self) -> None:
        """Cancel all requests that `advance` has begun, and forget."""
        return self.forget()

    def forget(self) -> None:
        """Drop the prefix cache; on CPU, free its memory too."""
        return None

    def load_weights(self, transport: Transport, manifest: WeightManifest) -> None:
        """Receive weights (of a model or an adapter) from `transport`, and serve them as `manifest.version`.

        Every tensor must be consumed, or the sending ranks block.
        """

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log p(token t | tokens < t) at temperature 1 of every token; the first of each sequence is 0.0."""

    def served(self) -> tuple[ServedTensor, ...]:
        """Return every weight that it serves, read back where possible, for the proof of a publish."""

    @property
    def weight_version(self) -> int:
        """The version being served; 0 is the weights the engine was started with."""

    def probe(self, sequences: Sequence[Sequence[int]]) -> ProbeAnswer:
        """Return the log-probs of `sequences` at temperature 1, and the tensors that the engine serves."""
        return ProbeAnswer(self.weight_version, self.logprobs(sequences), self.served())

    def sleep(self, *, keep_weights: bool) -> None:
        """Release the device. If weights are not kept, they must be loaded again before sampling."""
        return None

    def wake(self, *, cache: bool = True) -> None:
        """Acquire the device again. cache: False: only the memory of the weights, to load them; `wake` must follow."""
        return None

    def shutdown(self) -> None:
        """Release all resources. The engine cannot be used afterwards."""
        return None


def start_engine(folder: Path, settings: EngineSettings) -> RolloutEngine:
    """Start an engine of `settings.config.type`, in a process dedicated to engines."""
    use_threads(settings.config.num_threads)
    engine: RolloutEngine = resolve_name(ENGINES[settings.config.type].implementation)(folder, settings)
    return engine
