"""The inputs of benchmarks.step_model: figures of the hardware, a model's shape, a workload and a layout.

Times are seconds, rates are per second and per device, lengths are in tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True, slots=True)
class Hardware:
    """Figures of a kind of device and its links. Shares are of the peak, reached in practice."""

    name: str
    flops: float
    memory: float  # bytes from device memory
    node: int  # devices of a node
    link: float  # bytes that a device sends to others of its node
    network: float  # bytes that a device sends to other nodes
    host: float  # bytes between a device and its host's memory
    store: float  # bytes of one object between two nodes, by Ray
    publish: float  # bytes of weights that are written, loaded and read back through a folder
    training: float  # share of flops, forward and backward
    scoring: float  # share of flops, forward
    prefill: float  # share of flops
    decoding: float  # share of flops, where a decoding step is limited by them
    reading: float  # share of memory, where a decoding step is limited by it
    optimizer: float  # share of memory, in the optimizer's step
    links: float  # share of link and network
    link_latency: float  # of one hop of a collective inside a node
    network_latency: float  # of one hop between nodes
    engine_step: float  # seconds of an engine's step beside the device's work
    request: float  # seconds of an engine to take in one request
    call: float  # seconds of one call of all ranks by the driver
    driver: float  # seconds of the driver for each token of the batch
    block: int  # tokens of a block of the prefix cache; only whole ones are shared
    together: float = 1.0  # speed of a device while the others of its node work, relative to alone

    def speed(self, devices: int) -> float:
        return self.together if devices > 1 else 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer with gated layers, without norms and biases."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head: int
    vocabulary: int
    tied: bool

    @property
    def backbone(self) -> int:
        """Weights of the layers' matrices."""
        attention = 2 * self.hidden * self.head * (self.heads + self.key_value_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        return self.backbone + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def cached(self) -> int:
        """Values of a token in the key-value cache."""
        return 2 * self.layers * self.key_value_heads * self.head

    def flops(self, computed: float, pairs: float, predicted: float) -> float:
        """FLOPs of a forward. pairs: of queries and keys. predicted: tokens that go through the output head."""
        attention = 4 * self.layers * self.heads * self.head * pairs
        return 2 * self.backbone * computed + attention + 2 * self.hidden * self.vocabulary * predicted


@dataclass(frozen=True)
class Workload:
    """The rollouts of a step. Lengths are in tokens."""

    shape: Shape
    prompts: int
    group: int  # completions of a prompt
    prompt: int
    longest: int  # of a completion
    mean: int = 0  # of completions if none were cut off, whose lengths are geometric; 0: all are `longest`
    scored: int = 1  # forwards of all tokens beside the update: 1 for a reference
    weight_bytes: int = 2

    def lengths(self, count: int) -> list[float]:
        """Return the quantiles of `count` completions."""
        if not self.mean:
            return [float(self.longest)] * count
        drawn = (-self.mean * math.log1p(-(i + 0.5) / count) for i in range(count))
        return [min(max(1.0, length), float(self.longest)) for length in drawn]

    @cached_property
    def completions(self) -> list[float]:
        return self.lengths(self.prompts * self.group)

    @cached_property
    def sampled(self) -> float:
        """Sampled tokens, which are also those that are trained."""
        return sum(self.completions)

    @property
    def tokens(self) -> float:
        """Tokens of all sequences, prompts included, which pass through the driver."""
        return len(self.completions) * self.prompt + self.sampled

    @property
    def computed(self) -> float:
        """Tokens of a forward that computes the prompt of a group once (docs/design/decisions/0032)."""
        return self.prompts * self.prompt + self.sampled

    @cached_property
    def forward(self) -> float:
        """FLOPs of one forward of the whole batch."""
        own = sum(self.prompt * length + length**2 / 2 for length in self.completions)
        return self.shape.flops(self.computed, self.prompts * self.prompt**2 / 2 + own, self.sampled)

    @property
    def published(self) -> int:
        """Bytes of the weights."""
        return self.shape.parameters * self.weight_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Devices of training ranks and engines. hybrid: each device has both, in turn."""

    ranks: int
    engines: int
    engine_devices: int = 1  # that share each layer of an engine
    hybrid: bool = False
    asynchronous: bool = False  # sampling beside the rest of a step
    zero_stage: Literal[0, 2, 3] = 2
    micro_batch: int = 16_384  # tokens
    recomputed: float = 0.0  # forwards in the backward pass: 1 with gradient_checkpointing
    overlap: float = 0.0  # share of the update's computation that hides communication; 0 without overlap_comm
    slots: int = 256  # sequences that an engine decodes at once
    transport: Literal["folder", "collective"] = "folder"
    checkpoint_every: float = 600.0  # seconds

    def __post_init__(self) -> None:
        if self.hybrid and (self.transport == "collective" or self.engine_devices > 1 or self.ranks != self.engines):
            raise ValueError("a hybrid layout has as many engines as ranks, one device each, and the transport folder")

    @property
    def devices(self) -> int:
        return self.ranks if self.hybrid else self.ranks + self.engines * self.engine_devices
