"""Time and memory of a step's driver, beside sampling and training: `python -m benchmarks.driver`.

Synthetic completions arrive as from the engines' processes; they are packed, divided, sent to be scored, given
advantages, divided again and sent to be trained on, each by the code of the RL loop. Ray is left out: what it would
send is pickled as by Ray, and copied as into its object store. Each algorithm is measured in a process of its own; its
peak of memory is that above the completions as they arrived. Seconds are of one core.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.logprobs import machine, peak, reset_peak
from benchmarks.record import store_figures
from rlhf_core.algorithms import build_algorithm
from rlhf_core.config.rl.algorithm_table import ALGORITHMS
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.division import Division
from rlhf_core.episodes.tokens import EpisodeTokens
from rlhf_core.losses.aggregation import loss_weights
from rlhf_core.packing import plain
from rlhf_core.rl.experience import pack_trajectories, require_finite
from rlhf_core.types import Completion, Minibatch, PackedBatch, Prompt, Scored, Trajectory

WORDS, GROUP, REPLICAS, MICRO_BATCH = 150_000, 8, 8, 16_384
SHARE_OF_PROMPT = 0.25
PHASES = ("receive", "pack", "score", "advantages", "update")


@dataclass(frozen=True, slots=True)
class Case:
    algorithm: str
    trajectories: int
    tokens: int  # of a trajectory, in the mean
    longest: int = 0  # tokens of one more prompt's completions; 0: there is none


@dataclass(slots=True)
class Result:
    tokens: int
    seconds: dict[str, float] = field(default_factory=dict)  # of the processor, by phase
    sent: int = 0  # bytes to the ranks
    peak: int = 0  # bytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[name] = time.process_time() - started


def config_of(algorithm: str) -> RLConfig:
    """Return settings with all models that the algorithm can have."""
    optimizer = {"learning_rate": 1e-6}
    block: dict[str, Any] = {
        "rewards": {"exact": {"type": "verifier"}}, "optimizer": optimizer, "group_size": GROUP,
        "kl": {"coefficient": 0.01},
    }  # fmt: skip
    if algorithm == "ppo":
        block["critic"] = {"optimizer": optimizer}
    if algorithm == "on-policy-distillation":
        block["teacher"] = {"model": "teacher"}
    return RLConfig.model_validate({
        "dataset": "prompts", "steps": 1, "prompts_per_step": 2, "sampling": {"max_tokens": 4},
        "rollout": {"max_length": 8}, "algorithm": algorithm, ALGORITHMS[algorithm].block: block,
    })  # fmt: skip


def arrived(case: Case) -> tuple[list[Prompt], list[bytes]]:
    """Return the prompts, and the completions of each as an engine sends them."""
    draw = torch.Generator().manual_seed(0)
    of_prompt = int(SHARE_OF_PROMPT * case.tokens)
    prompts, answers = [], []
    for number in range(case.trajectories // GROUP + bool(case.longest)):
        row = {"id": str(number), "prompt": []}
        prompts.append(Prompt(str(number), "", tuple(_words(of_prompt, draw).tolist()), row))
        mean = case.tokens - of_prompt
        lengths = torch.randint(mean // 2, mean + mean // 2 + 1, (GROUP,), generator=draw).tolist()
        if number * GROUP >= case.trajectories:
            lengths = [case.longest - of_prompt] + [1] * (GROUP - 1)
        answers.append(pickle.dumps([_completion(length, draw) for length in lengths], protocol=5))
    return prompts, answers


def _words(count: int, draw: torch.Generator) -> Tensor:
    return torch.randint(WORDS, (count,), generator=draw)


def _completion(tokens: int, draw: torch.Generator) -> Completion:
    return Completion(_words(tokens, draw).tolist(), (-torch.rand(tokens, generator=draw)).tolist(), "stop", 0)


def trajectories_of(prompts: Sequence[Prompt], answers: Sequence[bytes]) -> Iterator[Trajectory]:
    for prompt, answer in zip(prompts, answers, strict=True):
        for index, completion in enumerate(pickle.loads(answer)):  # noqa: S301  # of this process
            tokens = EpisodeTokens()
            tokens.add_given(prompt.token_ids)
            tokens.add_sampled(completion)
            yield Trajectory(prompt, *tokens.tensors(), 0, "stop", reward=float(index % 3))


def divided(batch: PackedBatch) -> Division[PackedBatch]:
    return Division.of(batch, replicas=REPLICAS, tokens_per_micro_batch=MICRO_BATCH, shares_prompts=True)


def send(shards: Sequence[Sequence[PackedBatch]]) -> int:
    """Return the bytes of all shards, which are in memory together, as in an object store."""
    stored = []
    for shard in shards:
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
        stored.append(b"".join([pickled, *(buffer.raw() for buffer in buffers)]))
    return sum(map(len, stored))


def measure(case: Case) -> Result:
    """Run one step in this process."""
    torch.set_num_threads(1)
    config = config_of(case.algorithm)
    algorithm = build_algorithm(config)
    prompts, answers = arrived(case)
    start = reset_peak()
    result = Result(tokens=0)
    with result.phase("receive"):
        trajectories = list(trajectories_of(prompts, answers))
        answers.clear()
    with result.phase("pack"):
        rollouts = pack_trajectories(trajectories)
    with result.phase("score"):
        division = divided(plain(rollouts))
        shards = division.split()
        result.sent += send(shards)
        results = [[-torch.rand(part.num_tokens) * part.loss_mask for part in shard] for shard in shards]
        del shards
        names = ["old_logprobs", "ref_logprobs"]
        names += ["values"] * algorithm.uses_critic + ["teacher_logprobs"] * algorithm.uses_teacher
        scores: dict[str, Any] = {name: division.join(results) for name in names}
        scored = Scored(**vars(rollouts), **scores)
        del results
    with result.phase("advantages"):
        rewards = torch.tensor([trajectory.reward for trajectory in trajectories])
        groups = torch.arange(len(prompts)).repeat_interleave(GROUP)
        batch = algorithm.advantages(scored, rewards, groups, 0.01, {"exact": rewards})
        require_finite(batch, trajectories)
    with result.phase("update"):
        weights = loss_weights(batch.loss_mask, batch.episode_lengths, config.settings.aggregation, length=1)
        minibatch = Minibatch(**vars(batch), loss_weights=weights)
        result.sent += send(divided(minibatch).split())
    result.tokens, result.peak = batch.num_tokens, peak() - start
    return result


def in_own_process(case: Case) -> Result:
    command = [sys.executable, "-m", "benchmarks.driver", "--case", json.dumps(asdict(case))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Result(**json.loads(output))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=4096, help=f"of a step, {GROUP} of each prompt")
    parser.add_argument("--tokens", type=int, default=4000, help="of a trajectory, in the mean")
    parser.add_argument("--longest", type=int, default=0, help="tokens of one more trajectory")
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(asdict(measure(Case(**json.loads(options.case))))))
        return
    console = Console(width=140)
    console.print(machine())
    table = Table("algorithm", "tokens", *(f"{phase}, s" for phase in PHASES), "in all, s", "sent, GiB", "peak, GiB")
    figures = {}
    for algorithm in options.algorithms:
        result = in_own_process(Case(algorithm, options.trajectories, options.tokens, options.longest))
        figures[algorithm] = {
            "tokens": result.tokens, "processor_seconds": sum(result.seconds.values()),
            "sent_gib": result.sent / 2**30, "peak_gib": result.peak / 2**30,
        }  # fmt: skip
        table.add_row(
            algorithm, f"{result.tokens:,}", *(f"{result.seconds[phase]:.2f}" for phase in PHASES),
            f"{sum(result.seconds.values()):.2f}", f"{result.sent / 2**30:.2f}", f"{result.peak / 2**30:.2f}",
        )  # fmt: skip
    console.print(table)
    store_figures(figures, seeds=[0])


if __name__ == "__main__":
    main(sys.argv[1:])
