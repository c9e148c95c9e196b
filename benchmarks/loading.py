"""Memory of a rank while a model is loaded under ZeRO 3: `python -m benchmarks.loading 300m`.

Two ranks on this machine load a frozen Llama in bfloat16 and start its engine: first each rank loads the whole model,
then weights are divided over the ranks as they are read. MiB of resident memory over that after all imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.logprobs import machine
from benchmarks.record import store_figures
from benchmarks.word_models import SHAPES as SMALL_SHAPES
from benchmarks.word_models import Shape
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.models.loading import load_causal_model, torch_dtype
from rlhf_core.training.build import build_engine, sharding
from rlhf_core.training.distributed import host_store, join_group

SHAPES = {
    **SMALL_SHAPES,  # with an untied head
    "300m": Shape(32000, 1024, 2816, 20, 16, 8),
    "1b": Shape(32000, 2048, 5632, 22, 32, 4),  # TinyLlama-1.1B
}
RANKS = 2
WAYS = ("whole", "divided")
FILE = "500MB"
MIB = 2**20
ENGINE = EngineConfig(zero_stage=3)


class Holder(nn.Module):
    """The model as an engine takes it, without the check of layouts, whose forwards gather layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def write_model(shape: Shape, folder: Path) -> dict[str, int]:
    """Write a random model; return the bytes of all its weights and of its largest layer."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder, max_shard_size=FILE)
    layers = [model.get_input_embeddings(), *model.model.layers]
    return {"all": _bytes(model), "largest layer": max(_bytes(layer) for layer in layers)}


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def rank_memory(folder: Path, warm: Path, way: str, rank: int, address: str) -> dict[str, float]:
    """Return MiB of this rank over those after imports, and seconds. warm: a tiny model, loaded first to import all."""
    torch.set_num_threads(1)
    join_group(rank=rank, size=RANKS, address=address)
    _load(warm, way)
    before, began = restarted_peak(), time.perf_counter()
    model = _load(folder, way)
    found = {"loading": resident("VmHWM") - before, "loaded": resident("VmRSS") - before}
    restarted_peak()
    engine = build_engine(Holder(model), engine=ENGINE)
    found |= {"starting": resident("VmHWM") - before, "started": resident("VmRSS") - before}
    assert not engine.is_trained
    return {name: value / MIB for name, value in found.items()} | {"seconds": time.perf_counter() - began}


def _load(folder: Path, way: str) -> nn.Module:
    return load_causal_model(
        folder, dtype=torch_dtype(ENGINE.dtype), attention="sdpa",
        sharding=sharding(ENGINE) if way == "divided" else None,
    )  # fmt: skip


def restarted_peak() -> int:
    """Return the resident memory, and forget its peak."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def measure(folder: Path, warm: Path, way: str) -> list[dict[str, float]]:
    """Return the figures of all ranks."""
    outputs = rank_outputs(["-m", "benchmarks.loading", "--of", str(folder), str(warm), way], RANKS)
    return [json.loads(output) for output in outputs]


def rank_outputs(arguments: Sequence[str], ranks: int) -> list[str]:
    """Return the last line of each rank: a fresh Python with `arguments`, its number, and an address to join."""
    store = host_store("127.0.0.1")
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments, str(rank), f"127.0.0.1:{store.port}"], stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError("a rank failed: see its output above")
    return [output.splitlines()[-1] for output in outputs]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="300m")
    parser.add_argument("--of", nargs=5, metavar=("FOLDER", "WARM", "WAY", "RANK", "ADDRESS"), help="one rank")
    parsed = parser.parse_args(arguments)
    if parsed.of:
        folder, warm, way, rank, address = parsed.of
        print(json.dumps(rank_memory(Path(folder), Path(warm), way, int(rank), address)))
        return
    with tempfile.TemporaryDirectory() as work:
        folder, warm = Path(work, "model"), Path(work, "warm")
        sizes = write_model(SHAPES[parsed.shape], folder)
        write_model(SHAPES["1m"], warm)
        results = {way: measure(folder, warm, way) for way in WAYS}
    share, layer = sizes["all"] / RANKS / MIB, sizes["largest layer"] / MIB
    title = f"{parsed.shape}: share {share:.0f}, largest layer {layer:.0f}, 1.1 x both {1.1 * (share + layer):.0f} MiB"
    columns = ("loading", "loaded", "starting", "started")
    table = Table("weights", "rank", *(f"{name}, MiB" for name in columns), "seconds", title=title)
    for way, ranks in results.items():
        for rank, found in enumerate(ranks):
            table.add_row(way, str(rank), *(f"{found[name]:.0f}" for name in columns), f"{found['seconds']:.1f}")
    console = Console()
    console.print(machine())
    console.print(table)
    peaks = {
        way: {"peak_mib": max(found[name] for found in ranks for name in columns)} for way, ranks in results.items()
    }
    store_figures({"weights_mib": sizes["all"] / MIB, **peaks})


if __name__ == "__main__":
    main()
