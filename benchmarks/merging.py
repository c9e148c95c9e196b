"""Memory while an adapter is merged: `python -m benchmarks.merging 300m`.

A fresh Python merges an adapter of all linear layers into a random Llama in bfloat16: first with peft and the whole
model in memory, then one tensor at a time. MiB of resident memory over that after the merge of a tiny model.
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
from safetensors.torch import load_file

from benchmarks.loading import MIB, SHAPES, resident, restarted_peak, write_model
from benchmarks.logprobs import machine
from benchmarks.record import store_figures
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.merging import merge_adapter

WAYS = ("whole", "by tensors")


def write_adapter(folder: Path, adapter: Path) -> None:
    adapted = load_causal_model(folder, dtype=torch.bfloat16, attention="sdpa", lora=LoraConfig(rank=16))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.01)
    adapted.save_pretrained(str(adapter))


def merge(work: Path, way: str) -> None:
    """Merge the adapter of `work`; with all settings of peft allowed the model is in memory as a whole."""
    if way == "whole":
        config = work / "adapter" / "adapter_config.json"
        settings = json.loads(config.read_text(encoding="utf-8")) | {"rank_pattern": {"no_such_layer": 8}}
        config.write_text(json.dumps(settings), encoding="utf-8")
    merge_adapter(work / "model", work / "adapter", work / way)


def measured(work: Path, warm: Path, way: str) -> dict[str, float]:
    torch.set_num_threads(1)
    merge(warm, way)
    before, began = restarted_peak(), time.process_time()
    merge(work, way)
    return {"MiB": (resident("VmHWM") - before) / MIB, "CPU s": time.process_time() - began}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="300m")
    parser.add_argument("--of", nargs=3, metavar=("FOLDER", "WARM", "WAY"), help="one merge")
    parsed = parser.parse_args(arguments)
    if parsed.of:
        work, warm, way = parsed.of
        print(json.dumps(measured(Path(work), Path(warm), way)))
        return
    with tempfile.TemporaryDirectory() as root:
        table = Table("merge", "peak, MiB", "CPU s")
        results, figures = [], {}
        for way in WAYS:
            folders = {name: Path(root, way, name) for name in ("work", "warm")}
            for name, folder in folders.items():
                torch.manual_seed(0)
                sizes = write_model(SHAPES[parsed.shape if name == "work" else "1m"], folder / "model")
                write_adapter(folder / "model", folder / "adapter")
                if name == "work":
                    weights = sizes["all"] / MIB
                    table.title = f"{parsed.shape}: {weights:.0f} MiB of weights"
            command = [sys.executable, "-m", "benchmarks.merging", "--of", *map(str, folders.values()), way]
            line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
            found = json.loads(line)
            table.add_row(way, *(f"{value:.1f}" for value in found.values()))
            figures[way] = {"peak_mib": found["MiB"], "processor_seconds": found["CPU s"]}
            results.append(load_file(folders["work"] / way / "model.safetensors"))
        whole, by_tensors = results
        assert all(torch.equal(tensor, by_tensors[name]) for name, tensor in whole.items())
    console = Console()
    console.print(machine())
    console.print(table)
    store_figures({"weights_mib": weights, **figures}, seeds=[0])


if __name__ == "__main__":
    main()
