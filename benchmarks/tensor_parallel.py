"""Ranks that share the weights of a model: `python -m benchmarks.tensor_parallel [--meshes 1x1 1x2 2x2]`.

Steps of AdamW at ZeRO 2 in float32 on a model of 57M parameters with random weights, on replicas x ranks that share
each weight. Per mesh, of the first rank: its parameters; the growth of its memory (RssAnon, without pages of files)
from before the model is loaded to the end of the last step; the seconds of a step and the processor seconds (medians of
some); and the largest differences of log-probs, and of the whole gradient of a step without ZeRO, from one rank's.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.layouts import VOCABULARY
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.division import Division
from rlhf_core.mesh import current_mesh
from rlhf_core.metrics import LossAndMetrics, Sum
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.tensor_parallel import cut_of
from rlhf_core.packing import pack
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.distributed import host_store, join_group
from rlhf_core.types import PackedBatch

_SEQUENCES, _LENGTH = 8, 96
# Weights stay as they are, and AdamW's first moment is the gradient.
_GRADIENT = OptimizerConfig(learning_rate=1e-30, betas=(0.0, 0.95), max_gradient_norm=1e6)


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


def engine_of(folder: Path, optimizer: OptimizerConfig, zero_stage: int) -> DeepSpeedEngine:
    config = EngineConfig.model_validate({"dtype": "float32", "zero_stage": zero_stage})
    model = load_causal_model(folder, dtype=torch.float32, attention="sdpa")
    return DeepSpeedEngine(PolicyModel(model), engine=config, optimizer=optimizer, total_steps=1)


def mebibytes() -> float:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def measure(rank: int, data: int, tensor: int, address: str, folder: Path, repeats: int) -> None:
    """Write what rank 0 has found; on one rank log-probs and gradient too, which others compare with."""
    torch.set_num_threads(1)
    join_group(rank=rank, size=data * tensor, address=address, tensor=tensor)
    mesh, before = current_mesh(), mebibytes()
    own = Division.of(batch(), replicas=mesh.data, tokens_per_micro_batch=2048).split()[mesh.replica]
    engine = engine_of(folder / "model", OptimizerConfig(learning_rate=1e-4), zero_stage=2)
    seconds, worked = [], []
    for _ in range(repeats):
        began, cpu = time.perf_counter(), time.process_time()
        engine.step(own, loss)
        seconds.append(time.perf_counter() - began)
        worked.append(time.process_time() - cpu)
    kept = mebibytes() - before
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    del engine
    exact = engine_of(folder / "model", _GRADIENT, zero_stage=0)
    (logprobs,) = exact.forward([batch()], lambda model, part: model(part)[0])
    exact.step(own, loss)
    assert exact.optimizer is not None
    moments = [(p, exact.optimizer.state[p]["exp_avg"]) for p in exact.module.parameters()]
    whole = [moment if (cut := cut_of(p)) is None else cut.whole(moment) for p, moment in moments]
    gradient = torch.cat([value.flatten() for value in whole])
    if rank == 0:
        stored = folder / "alone.safetensors"
        if data * tensor == 1:
            save_file({"logprobs": logprobs, "gradient": gradient}, stored)
        expected, wanted = (load_file(stored)[key] for key in ("logprobs", "gradient"))
        found = {
            "parameters": parameters / 1e6, "mebibytes": kept,
            "seconds": statistics.median(seconds), "worked": statistics.median(worked),
            "logprobs": float((logprobs - expected).abs().max()),
            "gradient": float((gradient - wanted).norm() / wanted.norm()),
        }  # fmt: skip
        (folder / f"{data}x{tensor}.json").write_text(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel", description=__doc__)
    parser.add_argument("--meshes", nargs="+", default=["1x1", "1x2", "2x2"], help="replicas x ranks, the first 1x1")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each case")
    parsed = parser.parse_args(arguments)
    shown = Table(
        "replicas x ranks", "parameters a rank, M", "memory a rank, MiB", "s a step", "CPU s a rank", "log-probs off",
        "gradient off",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model")
        for mesh in parsed.meshes:
            data, tensor = map(int, mesh.split("x"))
            store = host_store("127.0.0.1")
            address = f"127.0.0.1:{store.port}"
            processes = [
                get_context("spawn").Process(target=measure, args=(rank, data, tensor, address, folder, parsed.repeats))
                for rank in range(data * tensor)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            case = json.loads((folder / f"{mesh}.json").read_text())
            shown.add_row(
                mesh, f"{case['parameters']:.1f}", f"{case['mebibytes']:.0f}", f"{case['seconds']:.1f}",
                f"{case['worked']:.1f}", f"{case['logprobs']:.1e}", f"{case['gradient']:.1e}",
            )  # fmt: skip
    Console(width=120).print(shown)


if __name__ == "__main__":
    main()
