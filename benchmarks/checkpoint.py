"""Cost of a checkpoint: `python -m benchmarks.checkpoint [--hidden 384] [--layers 8] [--steps 12] [--rounds 3]`.

One rank trains a model of random weights on random tokens, alternately in rounds with and without checkpoints. Measures
the pause of training, the time of the concurrent write, and the slowdown of the steps meanwhile.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import store_figures
from benchmarks.stage_alone import FolderContext, stage_input
from rlhf_core.artifacts.checkpoints import Checkpoint, Checkpoints
from rlhf_core.artifacts.manifest import ArtifactRef, Kind
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.store import Store
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.checkpoint import CheckpointConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.supervised.examples import Example, divide
from rlhf_core.supervised.sft import LanguageModelWorker, pack_sequences
from rlhf_core.training.checkpointing import Checkpointing
from rlhf_core.training.group import InlineGroup

VOCABULARY = 8192


@dataclass
class StoreContext(FolderContext):
    """Context with checkpoints in a store of its own."""

    store: Store = field(kw_only=True)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.store, ArtifactRef(stage=self.name, key=self.key))


class TimedCheckpointing(Checkpointing):
    """Measures the time of each write, beside the training."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.written: list[float] = []

    def _commit(self, *args: Any) -> None:
        began = time.perf_counter()
        super()._commit(*args)
        self.written.append(time.perf_counter() - began)


@dataclass
class Round:
    seconds: float = 0.0
    stalls: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)


def train(
    steps: int,
    every: int | None,
    workers: InlineGroup[LanguageModelWorker],
    context: StoreContext,
    examples: Sequence[Example],
) -> Round:
    """Return the time per round until the last step is done; a write in progress is waited for, but not counted."""
    measured = Round()
    config = CheckpointConfig(every_steps=every, every_minutes=None)
    checkpoints = TimedCheckpointing(config, context, workers, {})
    (shard,) = divide(pack_sequences(examples), replicas=1, tokens_per_micro_batch=1 << 20)
    began = time.perf_counter()
    for step in range(1, steps + 1):
        workers.scatter(LanguageModelWorker.train, [[shard]])
        before = time.perf_counter()
        checkpoints.after(step)
        stall = time.perf_counter() - before
        if every is not None and step % every == 0:
            measured.stalls.append(stall)
    measured.seconds = time.perf_counter() - began
    checkpoints.finish()
    measured.written = checkpoints.written
    return measured


def report(options: argparse.Namespace, size: int, parameters: int, off: list[Round], on: list[Round]) -> Table:
    without, with_ = (options.steps * len(rounds) / sum(r.seconds for r in rounds) for rounds in (off, on))
    stalls = [seconds for r in on for seconds in r.stalls]
    written = [seconds for r in on for seconds in r.written]
    table = Table(title=f"{parameters / 1e6:.1f} M parameters, {size / 1e6:.0f} MB a checkpoint, every {options.every} "
                        f"steps, {torch.get_num_threads()} thread(s), load {os.getloadavg()[0]:.1f}")  # fmt: skip
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in {
        "training stands still, median": f"{statistics.median(stalls) * 1000:.0f} ms",
        "first of a run (its memory is new)": f"{on[0].stalls[0] * 1000:.0f} ms",
        "written beside the training, median": f"{statistics.median(written) * 1000:.0f} ms",
        "stands still / written": f"{statistics.median(stalls) / statistics.median(written):.1%}",
        "stands still / all time": f"{sum(stalls) / sum(r.seconds for r in on):.2%}",
        "steps/s without": f"{without:.3f}",
        "steps/s with": f"{with_:.3f} ({with_ / without - 1:+.1%})",
    }.items():
        table.add_row(name, value)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("hidden", 384), ("layers", 8), ("steps", 12), ("every", 4), ("rounds", 3), ("tokens", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--store", help="s3://bucket/prefix or a folder; none: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
                num_hidden_layers=options.layers, num_attention_heads=8, tie_word_embeddings=True,
            )
        )  # fmt: skip
        model.save_pretrained(folder / "model")
        config = SFTConfig(
            dataset="random", batch_size=8, max_length=options.tokens, optimizer=OptimizerConfig(learning_rate=1e-4),
            engine=EngineConfig(dtype=options.dtype, zero_stage=0),
        )  # fmt: skip
        (folder / "work").mkdir()
        trained = stage_input(folder / "model", Kind.BASE_MODEL)
        store = open_store(options.store or str(folder / "store"))
        context = StoreContext(folder / "work", {trained.manifest.ref.path: trained}, name="benchmark", store=store)
        workers = InlineGroup(LanguageModelWorker, config, context, trained.manifest.ref, 1 << 20)
        draw = random.Random(0)
        length = options.tokens // 8
        examples = [
            Example(str(i), ([draw.randrange(VOCABULARY) for _ in range(length)],), ([False, *[True] * (length - 1)],))
            for i in range(8)
        ]
        train(2, None, workers, context, examples)  # warm-up
        off, on = [], []
        for _ in range(options.rounds):
            off.append(train(options.steps, None, workers, context, examples))
            on.append(train(options.steps, options.every, workers, context, examples))
        newest = next(context.checkpoints.newest())
        assert isinstance(newest, Checkpoint)
        size = sum(file.size for file in newest.files)
        Console().print(report(options, size, sum(p.numel() for p in model.parameters()), off, on))
        stalls = [seconds for each in on for seconds in each.stalls]
        store_figures({
            "megabytes": size / 1e6, "paused_milliseconds": statistics.median(stalls) * 1000,
            "paused_share": sum(stalls) / sum(each.seconds for each in on),
        }, seeds=[0])  # fmt: skip
        context.checkpoints.clear()


if __name__ == "__main__":
    main()
