"""Unit costs of this machine for benchmarks.step_model: one rank and one engine of one thread, and two processes."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from benchmarks.grpo_ours import config
from benchmarks.grpo_workload import GRPOWorkload
from benchmarks.stage_alone import stage_inputs
from benchmarks.step_inputs import Hardware, Shape, Workload
from benchmarks.step_model import OPTIMIZER_BYTES
from rlhf_core.algorithms import build_algorithm
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.episodes.tokens import EpisodeTokens
from rlhf_core.rl.experience import pack_trajectories
from rlhf_core.rl.hybrid import OwnDevices
from rlhf_core.rl.publisher import Publisher
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rollout.engine import Request, RolloutEngine, SamplingParameters
from rlhf_core.rollout.engines import Engines
from rlhf_core.stages.ray_cluster import RayCluster
from rlhf_core.stages.rl import ranks_and_engines
from rlhf_core.training.distributed import host_store, join_group
from rlhf_core.types import Completion, Prompt, Trajectory

BATCHES = (1, 16, 48)  # of decoding
PROMPT, LONG_PROMPT, DECODED, GROUP = 24, 152, 24, 8
PROMPTS = (2, 6)  # of an update
_FLOPS, _MEMORY = 100e9, 10e9  # of which measured shares are; the products are what counts


@dataclass(frozen=True, slots=True)
class Pair:
    """Two processes on this machine."""

    together: float  # speed of one while the other works, relative to alone
    link: float  # bytes a second in an all-gather by gloo
    latency: float  # of one hop


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one rank and one engine."""

    first: Sequence[float]  # of one token of each sequence of BATCHES, after PROMPT tokens
    steps: Sequence[float]  # of one token more of each
    long: float  # of one token of each sequence of the second batch, after LONG_PROMPT tokens
    trained: Sequence[tuple[float, float, float]]  # of few and more PROMPTS: FLOPs of a forward, score, update
    published: float


def settings(workload: GRPOWorkload, ranks: int, engines: int) -> RLConfig:
    asked = config(workload, "ours").model_dump(mode="json", exclude_unset=True)
    asked["placement"] |= {"workers": ranks, "cpus_per_worker": 0.5}
    longest = max(workload.length, LONG_PROMPT + 1)
    asked["rollout"] |= {"engines": engines, "cpus_per_engine": 0.5, "max_length": longest}
    asked["engine"]["zero_stage"] = 2
    asked["grpo"]["kl"] = {"coefficient": 0.01}
    return RLConfig.model_validate(asked)


def shape_of(workload: GRPOWorkload) -> Shape:
    of = workload.shape
    head = of.hidden // of.heads
    return Shape(of.layers, of.hidden, of.intermediate, of.heads, of.key_value_heads, head, of.vocabulary, tied=True)


def of_actors() -> dict[tuple[str, int], float]:
    """Return the processor seconds of this job's ranks and engines, by kind and process."""
    used = {}
    for child in psutil.Process().children(recursive=True):
        try:
            name, times = child.cmdline()[:1], child.cpu_times()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):  # Ray's workers come and go
            continue
        for kind in ("_Rank", "EngineActor"):
            if name and name[0].startswith(f"ray::{kind}"):
                used[kind, child.pid] = times.user + times.system
    return used


def critical(before: dict[tuple[str, int], float]) -> float:
    """Return the processor seconds since `before`: of the busiest rank and of the busiest engine, who work in turn."""
    after = of_actors()
    if after.keys() != before.keys():
        raise RuntimeError("a rank or an engine has started or ended")
    return sum(max(after[each] - before[each] for each in after if each[0] == kind) for kind in {k for k, _ in after})


def seconds(call: Callable[[], object], repeats: int, *, processor: bool = False) -> float:
    """Return the median of some calls, after one to warm up. processor: the mean of the actors' processor seconds."""
    call()
    if processor:
        before = of_actors()
        for _ in range(repeats):
            call()
        return critical(before) / repeats
    return statistics.median(timed(call, time.perf_counter) for _ in range(repeats))


def timed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    call()
    return clock() - began


def generated(engines: Engines, vocabulary: int, repeats: int, *, processor: bool) -> Callable[[int, int, int], float]:
    """Return a function (batch, prompt, tokens) -> seconds of `batch` completions of so many tokens."""
    draw, seeds = torch.Generator().manual_seed(0), count()

    def measure(batch: int, prompt: int, tokens: int) -> float:
        parameters = SamplingParameters(1.0, 1.0, tokens, stop_token_ids=(vocabulary - 1,))

        def sample() -> None:
            prompts = torch.randint(4, vocabulary - 1, (batch, prompt), generator=draw).tolist()
            requests = [Request(ids, parameters, next(seeds)) for ids in prompts]
            done = engines.share(RolloutEngine.generate, requests)
            if any(len(completion.token_ids) != tokens for completion in done):
                raise RuntimeError("a completion ended that never should")

        return seconds(sample, repeats, processor=processor)

    return measure


def trajectories(workload: GRPOWorkload, prompts: int) -> Iterator[Trajectory]:
    """Yield groups of random completions."""
    draw = torch.Generator().manual_seed(prompts)
    words = workload.shape.vocabulary - 1
    for number in range(prompts):
        prompt = Prompt(str(number), "", tuple(torch.randint(4, words, (PROMPT,), generator=draw).tolist()), {})
        for index in range(GROUP):
            sampled = torch.randint(4, words, (DECODED,), generator=draw).tolist()
            tokens = EpisodeTokens()
            tokens.add_given(prompt.token_ids)
            tokens.add_sampled(Completion(sampled, [-9.0] * DECODED, "length", 0))
            yield Trajectory(prompt, *tokens.tensors(), 0, "length", reward=float(index % 3))


def unit_costs(workload: GRPOWorkload, model: Path, repeats: int, processor: bool) -> Measured:
    """Measure one rank and one engine, each a Ray actor as in a stage. processor: in seconds of the processor."""
    chosen, shape = settings(workload, 1, 1), shape_of(workload)
    with tempfile.TemporaryDirectory(prefix="simulate-") as name:
        inputs, context = stage_inputs(model, Path(name), Path(name))
        with ranks_and_engines(chosen, inputs, context, RayCluster()) as (workers, engines, _):
            sampled = generated(engines, shape.vocabulary, repeats, processor=processor)
            taken = partial(seconds, repeats=repeats, processor=processor)
            first = [sampled(batch, PROMPT, 1) for batch in BATCHES]
            steps = [
                (sampled(batch, PROMPT, 1 + DECODED) - of_first) / DECODED
                for batch, of_first in zip(BATCHES, first, strict=True)
            ]
            long = sampled(BATCHES[1], LONG_PROMPT, 1)
            algorithm = build_algorithm(chosen)
            trainer = PolicyTrainer(chosen, algorithm, workers, seed=0)
            probe = [trajectory.prompt for trajectory in trajectories(workload, 4)][::GROUP]
            publisher = Publisher(chosen, trainer, engines, probe, OwnDevices())
            publisher.start(0)
            trained = []
            for prompts in PROMPTS:
                rollouts = pack_trajectories([*trajectories(workload, prompts)])
                scored = trainer.score(rollouts)
                rewards = torch.arange(prompts * GROUP) % 3
                groups = torch.arange(prompts).repeat_interleave(GROUP)
                batch = algorithm.advantages(scored, rewards.float(), groups, trainer.kl_coefficient, {})
                cost = Workload(shape, prompts, GROUP, PROMPT, DECODED)
                trained.append((
                    cost.forward, taken(partial(trainer.score, rollouts)),
                    taken(partial(trainer.update, batch, 0)),
                ))  # fmt: skip
            published = taken(publisher.publish)
    return Measured(first, steps, long, trained, published)


def fitted(shape: Shape, pair: Pair, measured: Measured) -> Hardware:
    """Solve the formulas for the figures of this machine. Raises RuntimeError if more work took less time."""
    first, steps = measured.first, measured.steps
    context = PROMPT + DECODED / 2
    flops = [shape.flops(batch, batch * context, batch) for batch in BATCHES]
    per_flop, engine_step = statistics.linear_regression(flops, steps)  # on a CPU weights are read beside computing
    short, longer = (BATCHES[1] * shape.flops(length, length**2 / 2, 0) for length in (PROMPT, LONG_PROMPT))
    prefill = (longer - short) / (measured.long - first[1])
    request = (first[1] - short / prefill - steps[1]) / BATCHES[1]
    (few, scored_few, updated_few), (more, scored_more, updated_more) = measured.trained
    scoring, training = (more - few) / (scored_more - scored_few), 3 * (more - few) / (updated_more - updated_few)
    call = max(0.0, scored_few - few / scoring)
    optimizer = shape.parameters * OPTIMIZER_BYTES / (updated_few - 3 * few / training - call)
    if min(per_flop, engine_step, prefill, scoring, training, optimizer) <= 0:
        raise RuntimeError("more work took less time: the machine is not idle, or there are too few repeats")
    return Hardware(
        "this machine",
        flops=_FLOPS, memory=_MEMORY, node=os.cpu_count() or 1, link=pair.link, network=math.inf,
        host=math.inf, store=math.inf, publish=4 * shape.parameters / measured.published, training=training / _FLOPS,
        scoring=scoring / _FLOPS, prefill=prefill / _FLOPS, decoding=1 / per_flop / _FLOPS,
        reading=math.inf, optimizer=optimizer / _MEMORY, links=1.0, link_latency=pair.latency, network_latency=0.0,
        engine_step=engine_step, request=max(0.0, request), call=call, driver=0.0, block=128, together=pair.together,
    )  # fmt: skip


def pair_of_processes(rank: int, address: str, file: Path, repeats: int, processor: bool) -> None:
    torch.set_num_threads(1)
    join_group(rank=rank, size=2, address=address)
    left, right, values = torch.rand(2048, 512), torch.rand(512, 2048), torch.rand(4_000_000)
    large, small = torch.ones(25_000_000), torch.ones(1)

    def median(call: Callable[[], object]) -> float:
        call()
        clock = time.process_time if processor else time.perf_counter
        return statistics.median(timed(call, clock) for _ in range(repeats))

    def work() -> None:
        for _ in range(20):
            torch.mm(left, right)
            values.exp()

    alone = median(work) if rank == 0 else 0.0
    dist.barrier()
    both = median(work)
    latency = median(lambda: [dist.all_reduce(small) for _ in range(50)]) / 50
    reduced = median(lambda: dist.all_reduce(large)) - latency
    if rank == 0:
        # Of two processes each sends half of the bytes over one hop, and again.
        file.write_text(json.dumps(asdict(Pair(min(1.0, alone / both), large.nbytes / reduced, latency / 2))))


def measured_pair(repeats: int, *, processor: bool) -> Pair:
    store = host_store("127.0.0.1")
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "pair.json"
        arguments = (f"127.0.0.1:{store.port}", file, repeats, processor)
        spawn = multiprocessing.get_context("spawn")
        processes = [spawn.Process(target=pair_of_processes, args=(rank, *arguments)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return Pair(**json.loads(file.read_text()))
