"""Steps of a training rank on CPUs with the allocator of the warm process, against the C library's:
`python -m benchmarks.allocator`.

Optimizer steps of a Llama with 25M parameters on sequences of ragged lengths, two micro-batches each. Each figure is of
a process of its own; the two settings take turns.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.grpo_workload import SHAPES
from benchmarks.logprobs import machine
from rlhf_core.config.engine import EngineConfig
from rlhf_core.config.training import OptimizerConfig
from rlhf_core.metrics import LossAndMetrics, Sum
from rlhf_core.models.loading import load_causal_model, torch_dtype
from rlhf_core.models.packed import PolicyModel
from rlhf_core.packing import pack
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.distributed import join_group
from rlhf_core.types import PackedBatch
from rlhf_core.warm.allocator import allocator

WARM_UP, STEPS, TURNS = 2, 4, 3
SEQUENCES = 12  # of a micro-batch
LENGTHS = (16, 160)  # in tokens, uniformly distributed


@dataclass(frozen=True, slots=True)
class Result:
    seconds: float  # per step
    faults: float  # page faults per step, in thousands
    peak: int  # MiB of the process


def measure(dtype: str) -> Result:
    engine, numbers = build(dtype), random.Random(0)
    for _ in range(WARM_UP):
        engine.step([micro_batch(numbers) for _ in range(2)], loss)
    faults, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    for _ in range(STEPS):
        engine.step([micro_batch(numbers) for _ in range(2)], loss)
    seconds, used = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    return Result(seconds / STEPS, (used.ru_minflt - faults) / STEPS / 1000, used.ru_maxrss // 1024)


def build(dtype: str) -> DeepSpeedEngine:
    disable_progress_bar()
    shape = SHAPES["25m"]
    torch.manual_seed(0)
    join_group(rank=0, size=1)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
                num_hidden_layers=shape.layers, num_attention_heads=shape.heads, tie_word_embeddings=True,
            )
        ).save_pretrained(folder)  # fmt: skip
        config = EngineConfig.model_validate({"dtype": dtype, "zero_stage": 0})
        model = load_causal_model(folder, dtype=torch_dtype(config.dtype), attention="sdpa")
    return DeepSpeedEngine(
        PolicyModel(model), engine=config, optimizer=OptimizerConfig(learning_rate=1e-5), total_steps=100
    )


def micro_batch(numbers: random.Random) -> PackedBatch:
    rows = [[numbers.randrange(SHAPES["25m"].vocabulary) for _ in range(numbers.randint(*LENGTHS))]
            for _ in range(SEQUENCES)]  # fmt: skip
    return pack(rows, [[i > 0 for i in range(len(row))] for row in rows])


def loss(model: nn.Module, batch: PackedBatch) -> LossAndMetrics:
    value = -(model(batch)[0] * batch.loss_mask).mean()
    return value, {"loss": Sum(value)}


def in_own_process(keeps: bool, dtype: str) -> Result:
    command = [sys.executable, "-m", "benchmarks.allocator", dtype]
    environment = {**os.environ, **(allocator({}) if keeps else {})}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Result(**json.loads(output.splitlines()[-1]))


def main(arguments: list[str]) -> None:
    if arguments:
        print(json.dumps(asdict(measure(arguments[0]))))
        return
    console = Console(width=120)
    console.print(machine())
    table = Table("dtype", "allocator", "s/step, median (all)", "thousand page faults/step", "MiB", "time, ratio")
    for dtype in ("float32", "bfloat16"):
        turns = [{keeps: in_own_process(keeps, dtype) for keeps in (False, True)} for _ in range(TURNS)]
        ratio = statistics.median(turn[True].seconds / turn[False].seconds for turn in turns)
        for keeps in (False, True):
            results = [turn[keeps] for turn in turns]
            seconds = [result.seconds for result in results]
            table.add_row(
                dtype, "jemalloc that keeps" if keeps else "glibc",
                f"{statistics.median(seconds):.2f} ({', '.join(f'{each:.2f}' for each in seconds)})",
                f"{statistics.median(result.faults for result in results):.0f}",
                f"{max(result.peak for result in results)}", f"{ratio:.2f}" if keeps else "",
            )  # fmt: skip
    console.print(table)
    console.print(f"load average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
