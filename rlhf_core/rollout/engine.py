"""The contract of a rollout engine: tokens in, tokens out, and a proof of which weights it serves."""

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
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0

    @classmethod
    def of(cls, config: SamplingConfig, stop_token_ids: tuple[int, ...]) -> SamplingParameters:
        return cls(
            temperature=config.temperature, top_p=config.top_p, max_tokens=config.max_tokens,
            stop_token_ids=stop_token_ids, top_k=config.top_k, min_p=config.min_p,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RequestImage:
    content: bytes  # of its file
    start: int  # index in the prompt of the first token that stands for it
    length: int  # tokens, the marks around it included


@dataclass(frozen=True, slots=True)
class Request:
    """One completion that an engine is asked for. Raises ValueError for a random one without a seed."""

    prompt: Sequence[int]  # tokens
    parameters: SamplingParameters
    seed: int | None  # so that it repeats exactly; none where greedy
    images: Sequence[RequestImage] = ()  # of the prompt, in their order

    def __post_init__(self) -> None:
        if (self.seed is None) != (self.parameters.temperature == 0):
            raise ValueError(f"temperature {self.parameters.temperature:g} with the seed {self.seed}")


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """One weight as an engine serves it."""

    name: str  # the engine's own: a head that is tied to the embedding has one too
    published: str  # the tensor of a publish whose values it should have
    digest: str  # digest.tensor_digest of its values
    read_back: bool = True  # False: the digest is of the values that the engine was given; its layout cannot be read


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The proof of one engine of what it serves."""

    version: int
    logprobs: list[list[float]]
    served: tuple[ServedTensor, ...] = ()


class RolloutEngine(Protocol):
    """Sampling is a function of (weights, requests): the same call of `generate` gives the same completions.

    An engine that keeps nothing inherits `forget`, `sleep`, `wake` and `shutdown`.
    """

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        """The completion of each request, in their order. A prompt that leaves no room raises ValueError.

        keep_prefixes: of prompts that begin like one of an earlier call, compute the rest alone. Results differ in the
        last bits from those without, and so are a function of all calls since the last one that kept nothing.
        """

    def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
        """Take more requests, by numbers of the caller's, and sample: the completions that are whole by now.

        abandoned: those taken before that are sampled no further; of one that is whole already nothing happens.
        Returns as soon as there is one, and soon without one, so that others can be added. Repeats nothing to the bit.
        """
        return dict(zip(requests, self.generate(list(requests.values())), strict=True))

    def forget(self) -> None:
        """Nothing that is asked from now on continues what was asked before: on CPU, what was kept of it is freed."""
        return None

    def load_weights(self, transport: Transport, manifest: WeightManifest) -> None:
        """Serve the weights that `transport` brings (of a model, or of an adapter) as `manifest.version` from now on.

        All that it receives must be taken, or the ranks that send it wait.
        """

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token t | tokens < t) at temperature 1 of every token; the first of each sequence is 0.0."""

    def served(self) -> tuple[ServedTensor, ...]:
        """Every weight that it serves, as far as it can be read back: what a publish is proven by."""

    @property
    def weight_version(self) -> int:
        """The version being served; 0 is the weights the engine was started with."""

    def probe(self, sequences: Sequence[Sequence[int]]) -> ProbeAnswer:
        """The log-probs of `sequences` at temperature 1, and the tensors that the engine serves."""
        return ProbeAnswer(self.weight_version, self.logprobs(sequences), self.served())

    def sleep(self, *, keep_weights: bool) -> None:
        """Release the device. Weights that are not kept must be loaded again before anything is sampled."""
        return None

    def wake(self) -> None:
        """Take the device back."""
        return None

    def shutdown(self) -> None:
        """Release all resources. The engine cannot be used afterwards."""
        return None


def start_engine(folder: Path, settings: EngineSettings) -> RolloutEngine:
    """Start an engine of `settings.config.type`, in a process that is for engines."""
    use_threads(settings.config.num_threads)
    engine: RolloutEngine = resolve_name(ENGINES[settings.config.type].implementation)(folder, settings)
    return engine
