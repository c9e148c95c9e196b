"""Ranks that share batches, tokens and weights: `python -m benchmarks.parallelism [CASES]`.

Steps of AdamW in float32 on a model of 57M parameters with random weights. A case is REPLICASxSEQUENCExTENSOR/ZERO: its
replicas, the ranks that share the tokens of a sequence, those that share each weight, and the ZeRO stage. Of the rank
that has most: memory after a step (RssAnon, without pages of files) and its peak in one, over that before the model is
loaded. Of the first rank: seconds of a step and processor seconds (medians), and the largest difference of a log-prob,
and the norm of the gradient's difference relative to its own, from one rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.layouts import VOCABULARY
from benchmarks.loading import MIB, resident, restarted_peak
from benchmarks.logprobs import machine
from benchmarks.record import store_figures
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.division import Division
from rlhf_core.mesh import current_mesh
from rlhf_core.metrics import LossAndMetrics, Sum
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.packing import pack
from rlhf_core.training.build import build_engine, sharding
from rlhf_core.training.distributed import host_store, join_group
from rlhf_core.training.engine import TrainingEngine
from rlhf_core.types import PackedBatch

CASES = (
    "1x1x1/2", "2x1x1/0", "2x1x1/2", "2x1x1/3", "1x2x1/2", "1x2x1/3", "1x1x2/2",
    "4x1x1/2", "4x1x1/3", "1x4x1/2", "1x1x4/2", "2x2x1/3", "2x1x2/2", "1x2x2/2",
)  # fmt: skip
_SEQUENCES, _LENGTH = 8, 96
_SCALE = 1e4
# A step subtracts the gradient, times _SCALE: AdamW divides by epsilon, beside which its mean square is nothing.
_GRADIENT = OptimizerConfig(
    learning_rate=1e-3, betas=(0.0, 0.95), max_gradient_norm=None, schedule="constant", warmup_share=0.0
).model_copy(update={"epsilon": 1e8, "learning_rate": 1e8 * _SCALE})


@dataclass(frozen=True, slots=True)
class Case:
    replicas: int
    sequence: int
    tensor: int
    zero_stage: int

    @classmethod
    def parse(cls, text: str) -> Case:
        mesh, _, zero_stage = text.partition("/")
        replicas, sequence, tensor = map(int, mesh.split("x"))
        return cls(replicas, sequence, tensor, int(zero_stage))

    @property
    def ranks(self) -> int:
        return self.replicas * self.sequence * self.tensor

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig.model_validate(
            {
                "dtype": "float32", "zero_stage": self.zero_stage, "sequence_parallel": self.sequence,
                "tensor_parallel": self.tensor,
            }
        )  # fmt: skip


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def batch() -> PackedBatch:
    ids = torch.randint(3, VOCABULARY, (_SEQUENCES, _LENGTH), generator=torch.Generator().manual_seed(0))
    return pack([*ids], [torch.arange(_LENGTH) > 0] * _SEQUENCES)


def loss(model: nn.Module, part: PackedBatch) -> LossAndMetrics:
    value = -(model(part)[0] * part.loss_mask).sum() / (_SEQUENCES * (_LENGTH - 1))
    return value, {"loss": Sum(value)}


def engine_of(folder: Path, config: EngineConfig, optimizer: OptimizerConfig) -> TrainingEngine:
    model = load_causal_model(folder, dtype=torch.float32, attention="sdpa", sharding=sharding(config))
    return build_engine(PolicyModel(model), engine=config, optimizer=optimizer, total_steps=1)


def weights_of(engine: TrainingEngine) -> Tensor:
    return torch.cat([weight.detach().flatten().clone() for _, weight in engine.master_weights()])


def measure(rank: int, case: Case, address: str, folder: Path, repeats: int) -> None:
    """Write what this rank has found; one rank alone also log-probs and gradient, which others compare with."""
    torch.set_num_threads(1)
    join_group(rank=rank, size=case.ranks, address=address, sequence=case.sequence, tensor=case.tensor)
    mesh, before = current_mesh(), resident("RssAnon")
    own = Division.of(batch(), replicas=mesh.data, tokens_per_micro_batch=2048).split()[mesh.replica]
    engine = engine_of(folder / "model", case.engine, OptimizerConfig(learning_rate=1e-4))
    engine.step(own, loss)  # allocates the optimizer's state
    restarted_peak()
    files = resident("VmRSS") - resident("RssAnon")
    seconds, worked = [], []
    for _ in range(repeats):
        began, cpu = time.perf_counter(), time.process_time()
        engine.step(own, loss)
        seconds.append(time.perf_counter() - began)
        worked.append(time.process_time() - cpu)
    found = {
        "mib": (resident("RssAnon") - before) / MIB, "peak_mib": (resident("VmHWM") - files - before) / MIB,
        "seconds": statistics.median(seconds), "processor_seconds": statistics.median(worked),
    }  # fmt: skip
    del engine
    exact = engine_of(folder / "model", case.engine, _GRADIENT)
    (logprobs,) = exact.forward([batch()], lambda model, part: model(part)[0])
    weights = weights_of(exact)
    exact.step(own, loss)
    gradient = (weights - weights_of(exact)) / _SCALE
    if rank == 0:
        stored = folder / "alone.safetensors"
        if case.ranks == 1:
            save_file({"logprobs": logprobs, "gradient": gradient}, stored)
        expected, wanted = (load_file(stored)[key] for key in ("logprobs", "gradient"))
        found["logprobs"] = float((logprobs - expected).abs().max())
        found["gradient"] = float((gradient - wanted).norm() / wanted.norm())
    (folder / f"{rank}.json").write_text(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parallelism", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=CASES, help="the first on one rank")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each case")
    parsed = parser.parse_args(arguments)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**17)  # of the ranks: freed blocks from 128 KiB are not kept
    console = Console(width=140)
    console.print(machine())
    table = Table(
        "replicas", "sequence", "tensor", "ZeRO", "memory, MiB", "peak, MiB", "s a step", "CPU s a rank",
        "log-probs off", "gradient off",
    )  # fmt: skip
    figures = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model")
        for text in parsed.cases:
            case, store = Case.parse(text), host_store("127.0.0.1")
            address = f"127.0.0.1:{store.port}"
            processes = [
                get_context("spawn").Process(target=measure, args=(rank, case, address, folder, parsed.repeats))
                for rank in range(case.ranks)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                raise SystemExit(f"{text}: a rank failed, see above")
            found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(case.ranks)]
            first = found[0] | {name: max(each[name] for each in found) for name in ("mib", "peak_mib")}
            figures[text] = first
            table.add_row(
                str(case.replicas), str(case.sequence), str(case.tensor), str(case.zero_stage),
                f"{first['mib']:.0f}", f"{first['peak_mib']:.0f}", f"{first['seconds']:.2f}",
                f"{first['processor_seconds']:.2f}", f"{first['logprobs']:.1e}", f"{first['gradient']:.1e}",
            )  # fmt: skip
    console.print(table)
    store_figures(figures, seeds=[0])


if __name__ == "__main__":
    main()
