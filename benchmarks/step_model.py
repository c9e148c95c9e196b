"""Formulas for the time of one GRPO step: sampling, scoring, update, publish, driver and checkpoint.

The same formulas describe a cluster (benchmarks.simulate, figures of data sheets) and this machine
(benchmarks.simulate_here, measured figures). Every part of a step names the resource that limits it. Not modelled:
rewards and environments, failures, the memory of a device, sequence and tensor parallelism of ranks.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.step_inputs import Hardware, Layout, Workload

Part = tuple[str, str]  # phase, resource
Parts = dict[Part, float]  # seconds

OPTIMIZER_BYTES = 32  # of a parameter, that AdamW reads (gradient, weight, moments) and writes, and clipping reads
_STATE_BYTES = {"weights": 2, "gradients": 4, "optimizer": 12}  # of a parameter, see docs/operate/scale.md
_TENSORS_OF_LAYER = 9  # that a publish broadcasts one by one


@dataclass(frozen=True, slots=True)
class Step:
    parts: Mapping[Part, float]
    asynchronous: bool = False

    @property
    def phases(self) -> dict[str, float]:
        phases: defaultdict[str, float] = defaultdict(float)
        for (phase, _), seconds in self.parts.items():
            phases[phase] += seconds
        return dict(phases)

    @property
    def seconds(self) -> float:
        whole, sampling = sum(self.parts.values()), self.phases["sampling"]
        return max(sampling, whole - sampling) if self.asynchronous else whole

    @property
    def largest(self) -> Part:
        """The largest phase, and the resource that takes most of it."""
        phase = max(self.phases, key=self.phases.__getitem__)
        return max((part for part in self.parts if part[0] == phase), key=self.parts.__getitem__)

    def grown(self, since: Step) -> Part:
        """Return the part that has grown most since a smaller layout: what limits a larger one."""
        return max(self.parts, key=lambda part: self.parts[part] - since.parts.get(part, 0.0))


def ring(size: float, devices: int, hardware: Hardware, calls: int = 1) -> dict[str, float]:
    """Return the seconds by resource of an all-gather or reduce-scatter of `size` bytes in all, in some calls.

    A device sends (n - 1) / n of them, through all network links of a node together if the ring spans nodes. An
    all-reduce is both, twice this.
    """
    nodes = math.ceil(devices / hardware.node)
    rate, resource = hardware.link, "links"
    if nodes > 1 and hardware.node * hardware.network < rate:
        rate, resource = hardware.node * hardware.network, "network"
    hops = (devices - nodes) * hardware.link_latency + (nodes - 1) * hardware.network_latency
    return {resource: size * (devices - 1) / devices / (rate * hardware.links), "latency": calls * hops}


def decode_step(batch: float, context: float, workload: Workload, layout: Layout, hardware: Hardware) -> Parts:
    """One token of each of `batch` sequences: reading the weights and the cache, or computing, whichever is slower."""
    shape, shared = workload.shape, layout.engine_devices
    speed = hardware.speed(layout.engines * shared) * shared
    computing = shape.flops(batch, batch * context, batch) / (hardware.flops * hardware.decoding * speed)
    read = workload.weight_bytes * (shape.backbone + shape.hidden * shape.vocabulary + batch * context * shape.cached)
    reading = read / (hardware.memory * hardware.reading * speed)
    parts = {("sampling", "memory bandwidth" if reading > computing else "compute"): max(reading, computing)}
    parts["sampling", "engine's host"] = hardware.engine_step
    if shared > 1:  # two all-reduces of a layer
        size = 2 * batch * shape.hidden * workload.weight_bytes
        for resource, seconds in ring(2 * shape.layers * size, shared, hardware, 4 * shape.layers).items():
            parts["sampling", resource] = seconds
    return parts


def decode(lengths: Sequence[float], workload: Workload, layout: Layout, hardware: Hardware) -> Parts:
    """Decoding of one engine until its longest completion ends; a free slot takes the next sequence at once.

    What a step costs beyond the share of its sequences in a full one is the wait for stragglers.
    """
    waiting = [*lengths]
    random.Random(0).shuffle(waiting)
    active: list[tuple[float, float]] = []  # when each ends, and when it began, in steps
    now, parts = 0.0, Parts()
    full = min(layout.slots, len(waiting))
    while waiting or active:
        while waiting and len(active) < layout.slots:
            active.append((now + waiting.pop(), now))
        end = min(active)[0]
        context = workload.prompt + (now + end) / 2 - sum(began for _, began in active) / len(active)
        count, step = len(active), decode_step(len(active), context, workload, layout, hardware)
        useful = sum(decode_step(full, context, workload, layout, hardware).values()) * count / full
        share = min(1.0, useful / sum(step.values()))
        for part, seconds in step.items():
            parts[part] = parts.get(part, 0.0) + (end - now) * seconds * share
        late = (end - now) * sum(step.values()) * (1 - share)
        parts["sampling", "stragglers"] = parts.get(("sampling", "stragglers"), 0.0) + late
        active, now = [each for each in active if each[0] > end], end
    return parts


def sampling(workload: Workload, layout: Layout, hardware: Hardware) -> Parts:
    """The slowest engine, which has the longest of all completions."""
    prompts = math.ceil(workload.prompts / layout.engines)
    lengths = workload.lengths(prompts * workload.group)
    lengths[-1] = max(workload.completions)
    parts = decode(lengths, workload, layout, hardware)
    shared = min(workload.prompt, (workload.prompt - 1) // hardware.block * hardware.block)
    computed = shared + workload.group * (workload.prompt - shared)
    pairs = shared**2 / 2 + workload.group * (workload.prompt**2 - shared**2) / 2
    speed = hardware.speed(layout.engines * layout.engine_devices) * layout.engine_devices
    prefill = prompts * workload.shape.flops(computed, pairs, 0) / (hardware.flops * hardware.prefill * speed)
    parts["sampling", "prefill"] = prefill
    parts["sampling", "engine's host"] += hardware.request * prompts * workload.group
    if layout.asynchronous:  # free slots take the prompts of later steps
        del parts["sampling", "stragglers"]
    return parts


def score(workload: Workload, layout: Layout, hardware: Hardware) -> Parts:
    speed = hardware.flops * hardware.scoring * hardware.speed(layout.ranks)
    parts = {("score", "compute"): workload.scored * workload.forward / layout.ranks / speed}
    parts["score", "driver"] = hardware.call * bool(workload.scored)
    if layout.zero_stage == 3:
        gathers = workload.scored * micro_batches(workload, layout)
        for resource, seconds in ring(workload.published, layout.ranks, hardware, workload.shape.layers).items():
            parts["score", resource] = gathers * seconds
    return parts


def micro_batches(workload: Workload, layout: Layout) -> int:
    return math.ceil(workload.computed / layout.ranks / layout.micro_batch)


def update(workload: Workload, layout: Layout, hardware: Hardware) -> Parts:
    """Forward, backward of twice its FLOPs, the exchange of ZeRO, and AdamW on a rank's share of the parameters."""
    speed = hardware.speed(layout.ranks)
    computing = (3 + layout.recomputed) * workload.forward / layout.ranks / (hardware.flops * hardware.training * speed)
    owned = workload.shape.parameters / (layout.ranks if layout.zero_stage else 1)
    exchanged = zero(workload, layout, hardware)
    exposed = 1.0
    if total := sum(exchanged.values()):
        exposed = max(0.0, 1 - layout.overlap * computing / total)
    return {
        ("update", "compute"): computing,
        ("update", "memory bandwidth"): owned * OPTIMIZER_BYTES / (hardware.memory * hardware.optimizer * speed),
        ("update", "driver"): hardware.call,
        **{("update", resource): seconds * exposed for resource, seconds in exchanged.items()},
    }


def zero(workload: Workload, layout: Layout, hardware: Hardware) -> dict[str, float]:
    """Return the seconds by resource of what ranks exchange in an update.

    Gradients are float32, and DeepSpeed reduces them in every micro-batch: at stage 2 by an all-reduce of buckets, at
    stage 3 by a reduce-scatter of each layer, whose weights are gathered in forward and backward.
    """
    shape, count = workload.shape, micro_batches(workload, layout)
    gradients, weights = 4.0 * shape.parameters, float(workload.published)
    buckets = math.ceil(shape.parameters / 500e6)
    transfers = {
        0: [(2, gradients, 1)],
        2: [(2 * count, gradients, buckets), (1, weights, buckets)],
        3: [(2 * count, weights, shape.layers), (count, gradients, shape.layers)],
    }[layout.zero_stage]
    total: defaultdict[str, float] = defaultdict(float)
    for times, size, calls in transfers:
        for resource, seconds in ring(size, layout.ranks, hardware, calls).items():
            total[resource] += times * seconds
    return dict(total)


def publish(workload: Workload, layout: Layout, hardware: Hardware) -> Parts:
    """Gathering at ZeRO 3, the way to the engines and, where they share devices, ranks that leave and return."""
    size, parts = float(workload.published), defaultdict[Part, float](float)
    if layout.zero_stage == 3:
        for resource, seconds in ring(size, layout.ranks, hardware, workload.shape.layers).items():
            parts["publish", resource] += seconds
    engine_devices = layout.engines * layout.engine_devices
    if layout.transport == "collective":  # a broadcast sends all bytes through every link
        n = 1 + engine_devices
        calls = workload.shape.layers * _TENSORS_OF_LAYER
        for resource, seconds in ring(size * n / (n - 1), n, hardware, calls).items():
            parts["publish", resource] += seconds
    else:
        parts["publish", "host memory"] += size / hardware.publish
        copies = math.ceil(math.log2(math.ceil(engine_devices / hardware.node)))  # each node with one sends another
        parts["publish", "Ray's objects"] += copies * size / hardware.store
    if layout.hybrid:
        parts["publish", "host memory"] += 2 * state(workload, layout) / hardware.host
    return dict(parts)


def state(workload: Workload, layout: Layout) -> float:
    """Return the bytes of weights, gradients and optimizer that a rank keeps."""
    first = {"weights": 3, "gradients": 2, "optimizer": 1}  # stage of ZeRO that divides it
    return workload.shape.parameters * sum(
        size / (layout.ranks if layout.zero_stage >= first[name] else 1) for name, size in _STATE_BYTES.items()
    )


def step(workload: Workload, layout: Layout, hardware: Hardware) -> Step:
    parts = {
        **sampling(workload, layout, hardware), **score(workload, layout, hardware),
        **update(workload, layout, hardware), **publish(workload, layout, hardware),
        ("driver", "driver"): workload.tokens * hardware.driver,
    }  # fmt: skip
    paused = state(workload, layout) / hardware.host / layout.checkpoint_every  # of each second
    parts["checkpoint", "host memory"] = sum(parts.values()) * paused
    return Step(parts, layout.asynchronous)
