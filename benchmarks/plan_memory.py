"""Planned and measured memory of a training worker: `python -m benchmarks.plan_memory 25m`.

SFT of a random Llama takes two steps of a few micro-batches, on one rank and on two of this machine. Peaks are resident
memory over that after all imports and a step of a tiny model, of the rank that has the larger one. By default glibc
keeps freed blocks for later ones, which is not memory in use: here it returns them at once, unless --keep-freed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.loading import MIB, SHAPES, rank_outputs, resident, restarted_peak, write_model
from benchmarks.logprobs import machine
from benchmarks.record import store_figures
from benchmarks.stage_alone import FolderContext, stage_input
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.packing import pack
from rlhf_core.pipeline.memory import Shape, memory
from rlhf_core.supervised.examples import divide
from rlhf_core.supervised.sft import LanguageModelWorker
from rlhf_core.training.distributed import join_group

LENGTH, SEQUENCES, TOKENS = 512, 8, 2048  # of a sequence, of a step, of a micro-batch
LORA = {"lora": {"rank": 16}}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    ranks: int
    settings: dict[str, Any]

    @property
    def config(self) -> SFTConfig:
        return SFTConfig.model_validate({
            "dataset": "d", "batch_size": SEQUENCES, "max_length": LENGTH, "optimizer": {"learning_rate": 1e-4},
            "placement": {"workers": self.ranks},
            **self.settings, "engine": {"tokens_per_micro_batch": TOKENS, **self.settings["engine"]},
        })  # fmt: skip


F32 = {"dtype": "float32"}  # bfloat16 takes many times as long on CPUs without instructions for it
CASES = [
    Case("all weights", 1, {"engine": {**F32, "zero_stage": 0}}),
    Case("all weights, checkpointed", 1, {"engine": {**F32, "zero_stage": 0, "gradient_checkpointing": True}}),
    Case("all weights, ZeRO 2", 2, {"engine": F32}),
    Case("all weights, ZeRO 3", 2, {"engine": {**F32, "zero_stage": 3}}),
    Case("LoRA", 1, {"engine": F32, **LORA}),
    Case("LoRA, ZeRO 3", 2, {"engine": {**F32, "zero_stage": 3}, **LORA}),
    Case("all weights, bfloat16", 1, {"engine": {}}),
]


def rank_peak(folder: Path, warm: Path, case: Case, rank: int, address: str) -> int:
    """Return bytes. warm: a tiny model, trained first to import all."""
    torch.set_num_threads(1)
    join_group(rank=rank, size=case.ranks, address=address)
    take_steps(warm, case, rank)
    before = restarted_peak()
    take_steps(folder, case, rank)
    return resident("VmHWM") - before


def take_steps(folder: Path, case: Case, rank: int) -> None:
    model = stage_input(folder, Kind.BASE_MODEL)
    with tempfile.TemporaryDirectory() as work:
        context = FolderContext(Path(work), {model.manifest.ref.path: model})
        worker = LanguageModelWorker(case.config, context, model.manifest.ref, 2)
        ids = torch.randint(3, 1000, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
        batch = pack(list(ids), [torch.arange(LENGTH) > 0] * SEQUENCES)
        worker.train([divide(batch, case.ranks, TOKENS)[rank]] * 2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="25m")
    parser.add_argument("--cases", type=int, nargs="*", choices=range(len(CASES)), default=range(len(CASES)))
    parser.add_argument("--keep-freed", action="store_true", help="let glibc keep freed blocks, as it does by default")
    parser.add_argument("--of", nargs=5, metavar=("FOLDER", "WARM", "CASE", "RANK", "ADDRESS"), help="one rank")
    parsed = parser.parse_args(arguments)
    if parsed.of:
        folder, warm, number, rank, address = parsed.of
        print(rank_peak(Path(folder), Path(warm), CASES[int(number)], int(rank), address))
        return
    if not parsed.keep_freed:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**17)  # of the ranks: blocks from 128 KiB are maps of their own
    table = Table("SFT", "ranks", "planned, MiB", "peak, MiB", "planned / peak", title=parsed.shape)
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as work:
        folder, warm = Path(work, "model"), Path(work, "warm")
        write_model(SHAPES[parsed.shape], folder)
        write_model(SHAPES["1m"], warm)
        shape = Shape.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        assert shape is not None
        for number in parsed.cases:
            case = CASES[number]
            arguments = ["-m", "benchmarks.plan_memory", "--of", str(folder), str(warm), str(number)]
            peak = max(map(int, rank_outputs(arguments, case.ranks))) / MIB
            planned = memory(case.config, shape).worker / MIB
            table.add_row(case.name, str(case.ranks), f"{planned:.0f}", f"{peak:.0f}", f"{planned / peak:.2f}")
            figures[case.name] = {"planned_mib": planned, "peak_mib": peak, "planned_of_peak": planned / peak}
    console = Console()
    console.print(machine())
    console.print(table)
    if shares := [each["planned_of_peak"] for each in figures.values()]:
        figures["lowest and highest"] = {"planned_of_peak": [min(shares), max(shares)]}
    store_figures(figures)


if __name__ == "__main__":
    main()
