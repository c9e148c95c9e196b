"""How completions are sampled, and the engines that sample them."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.config.base import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    operational,
)
from rlhf_core.config.stage import Reservation


class SamplingConfig(Config):
    temperature: NonNegativeFloat = Field(default=1.0, description="0: greedy")
    top_p: Share = Field(default=1.0, description="sample from the smallest set of tokens with this probability")
    max_tokens: PositiveInt = Field(description="longest completion, in tokens")


class RolloutEngineConfig(Config):
    """vLLM engines. `max_length` bounds prompt plus completion."""

    max_length: PositiveInt = Field(description="prompt and completion together, in tokens")
    engines: PositiveInt = operational(1, description="engines, each with a copy of the model")
    tensor_parallel_size: PositiveInt = operational(1, description="GPUs that share each layer of one engine")
    pipeline_parallel_size: PositiveInt = operational(1, description="GPUs that share the layers of one engine")
    memory_share: Share = operational(
        0.9,
        description="of each GPU's memory, for weights and key-value cache; under rl.hybrid while the engine is awake",
    )
    cpu_cache_gib: PositiveFloat = operational(1.0, description="key-value cache of an engine on CPU, GiB")
    max_sequences: PositiveInt = operational(256, description="sequences decoded at once")
    prefix_caching: bool = operational(True, description="compute the common beginning of prompts once")
    compiled: bool = operational(False, description="compile and capture graphs; slower start, faster decoding")
    cpus_per_engine: PositiveFloat = operational(1.0, description="CPUs that Ray reserves")
    gpus_per_engine: NonNegativeFloat = operational(0.0, description="GPUs that Ray reserves")
    threads: NonNegativeInt = operational(0, description="0: as many as the reserved CPUs")

    def reserves(self) -> Reservation:
        return Reservation(cpus=self.engines * self.cpus_per_engine, gpus=self.engines * self.gpus_per_engine)
