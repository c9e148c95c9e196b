"""Planned and measured memory of a training worker: `python -m benchmarks.plan_memory 25m`.

SFT, DPO and the update of GRPO, both with a reference, take two steps of a random Llama in a few micro-batches, on one
rank and on two of this machine. Peaks are resident memory over that after all imports and a step of a tiny model, of
the rank that has the larger one. By default glibc
keeps freed blocks for later ones, which is not memory in use: here it returns them at once, unless --keep-freed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.division import Division
from rlhf_core.packing import pack
from rlhf_core.pipeline.memory import Shape, memory
from rlhf_core.rl.roles import roles
from rlhf_core.rl.worker import RLWorker
from rlhf_core.supervised.examples import Example, divide
from rlhf_core.supervised.pairs import pack_pairs
from rlhf_core.supervised.preference import PreferenceWorker
from rlhf_core.supervised.sft import LanguageModelWorker
from rlhf_core.training.distributed import join_group
from rlhf_core.types import Minibatch

LENGTH, SEQUENCES, TOKENS = 512, 8, 2048  # of a sequence, of a step, of a micro-batch
LORA = {"lora": {"rank": 16}}


@dataclass(frozen=True, slots=True)
class Case:
    stage: str
    name: str
    ranks: int
    settings: dict[str, Any]

    @property
    def config(self) -> SFTConfig | PreferenceConfig | RLConfig:
        settings = {
            "dataset": "d", "placement": {"workers": self.ranks}, **self.settings,
            "engine": {"tokens_per_micro_batch": TOKENS, **self.settings["engine"]},
        }  # fmt: skip
        optimizer = {"learning_rate": 1e-4}
        trained = {"max_length": LENGTH, "optimizer": optimizer}
        match self.stage:
            case "SFT":
                return SFTConfig.model_validate({**settings, **trained, "batch_size": SEQUENCES})
            case "DPO":
                losses = {"dpo": {"type": "dpo"}}
                return PreferenceConfig.model_validate(
                    {**settings, **trained, "batch_size": SEQUENCES // 2, "losses": losses}
                )
            case _:
                grpo = {
                    "rewards": {"exact": {"type": "verifier", "kind": "exact"}}, "group_size": SEQUENCES,
                    "kl": {"coefficient": 0.01}, "optimizer": optimizer,
                }  # fmt: skip
                return RLConfig.model_validate({
                    **settings, "algorithm": "grpo", "steps": 2, "prompts_per_step": 1, "grpo": grpo,
                    "sampling": {"max_tokens": LENGTH - 1}, "rollout": {"max_length": LENGTH},
                })  # fmt: skip


F32 = {"dtype": "float32"}  # bfloat16 takes many times as long on CPUs without instructions for it
CASES = [
    Case("SFT", "all weights", 1, {"engine": {**F32, "zero_stage": 0}}),
    Case("SFT", "all weights, checkpointed", 1, {"engine": {**F32, "zero_stage": 0, "gradient_checkpointing": True}}),
    Case("SFT", "all weights, ZeRO 2", 2, {"engine": F32}),
    Case("SFT", "all weights, ZeRO 3", 2, {"engine": {**F32, "zero_stage": 3}}),
    Case("SFT", "LoRA", 1, {"engine": F32, **LORA}),
    Case("SFT", "LoRA, ZeRO 3", 2, {"engine": {**F32, "zero_stage": 3}, **LORA}),
    Case("SFT", "all weights, bfloat16", 1, {"engine": {}}),
    *(
        Case(stage, name, ranks, {"engine": {**F32, "zero_stage": zero_stage}, **lora})
        for stage in ("DPO", "GRPO")
        for name, ranks, zero_stage, lora in (
            ("all weights", 1, 0, {}), ("all weights, ZeRO 2", 2, 2, {}), ("LoRA", 1, 2, LORA),
        )
    ),
]  # fmt: skip


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
    ref, config = model.manifest.ref, case.config
    ids = torch.randint(3, 1000, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    masks = [torch.arange(LENGTH) > 0] * SEQUENCES
    with tempfile.TemporaryDirectory() as work:
        context = FolderContext(Path(work), {ref.path: model})
        match config:
            case SFTConfig():
                shard = divide(pack(list(ids), masks), case.ranks, TOKENS)[rank]
                LanguageModelWorker(config, context, ref, 2).train([shard] * 2)
            case PreferenceConfig():
                pairs = pack_pairs([
                    Example(str(i), tuple(ids[i : i + 2].tolist()), ([False] + [True] * (LENGTH - 1),) * 2)
                    for i in range(0, SEQUENCES, 2)
                ])  # fmt: skip
                PreferenceWorker(config, context, ref, 2, ref).train([divide(pairs, case.ranks, TOKENS)[rank]] * 2)
            case _:
                minibatch = Minibatch(
                    **vars(pack(list(ids), masks)), rollout_logprobs=torch.zeros(ids.numel()),
                    advantages=torch.ones(ids.numel()), loss_weights=torch.full((ids.numel(),), 1 / ids.numel()),
                )  # fmt: skip
                division = Division.of(minibatch, replicas=case.ranks, tokens_per_micro_batch=TOKENS)
                batches = division.split()[rank]
                worker = RLWorker(config, context, roles(config, {"model": model}))
                for _step in range(2):
                    scores = worker.score(batches, ["ref_logprobs"])
                    scored = [
                        replace(batch, ref_logprobs=score["ref_logprobs"])
                        for batch, score in zip(batches, scores, strict=True)
                    ]
                    worker.update_policy(scored, 0.01)


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
    table = Table("stage", "weights", "ranks", "planned, MiB", "peak, MiB", "planned / peak", title=parsed.shape)
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
            table.add_row(
                case.stage, case.name, str(case.ranks), f"{planned:.0f}", f"{peak:.0f}", f"{planned / peak:.2f}"
            )
            figures[f"{case.stage}, {case.name}"] = {
                "planned_mib": planned,
                "peak_mib": peak,
                "planned_of_peak": planned / peak,
            }
    console = Console()
    console.print(machine())
    console.print(table)
    if shares := [each["planned_of_peak"] for each in figures.values()]:
        figures["lowest and highest"] = {"planned_of_peak": [min(shares), max(shares)]}
    store_figures(figures)


if __name__ == "__main__":
    main()
