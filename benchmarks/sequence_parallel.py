"""Ranks that share the tokens of a batch: `python -m benchmarks.sequence_parallel [--ranks 1 2 4]`.

Forward and backward of the log-probs of one batch by a model of 25M parameters with random weights, in float32. Per
number of ranks: what a rank keeps for its backward pass beside weights, the seconds of a pass and the processor seconds
of the first rank (medians of some passes), and the largest differences of log-probs and gradients from one rank's. One
model has 8 heads, which the ranks exchange tokens for, and one has 7: each rank then gathers all keys and values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.layouts import VOCABULARY
from benchmarks.record import store_figures
from rlhf_core.mesh import current_mesh
from rlhf_core.models.packed import PolicyModel
from rlhf_core.packing import pack
from rlhf_core.training.distributed import host_store, join_group
from rlhf_core.types import PackedBatch

_HEADS = {8: (4, 512), 7: (1, 448)}  # key heads and hidden size by query heads
# Sequences of one prompt, and tokens of the prompt and of each completion.
_BATCHES = {"one of 1,024": (1, 32, 992), "8 x 96 of a prompt of 256": (8, 256, 96)}


def model(heads: int) -> Any:
    """Return a PreTrainedModel."""
    torch.manual_seed(0)
    key_heads, hidden = _HEADS[heads]
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=1408, num_hidden_layers=6,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def batch(name: str) -> PackedBatch:
    count, prompt, completion = _BATCHES[name]
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, VOCABULARY, (prompt,), generator=generator)
    completions = torch.randint(3, VOCABULARY, (count, completion), generator=generator)
    return pack(
        [torch.cat([shared, part]) for part in completions], [torch.arange(prompt + completion) >= prompt] * count
    )


class Kept:
    """Counts the bytes that autograd keeps for the backward pass, each memory once, without that of weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._sizes: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def mebibytes(self) -> float:
        return sum(self._sizes.values()) / 2**20


def measure(rank: int, ranks: int, address: str, folder: Path, repeats: int) -> None:
    """Write what rank 0 has found for all cases; on one rank log-probs and gradients too, which others compare with."""
    torch.set_num_threads(1)
    join_group(rank=rank, size=ranks, address=address, sequence=ranks)
    found = list(cases(ranks, folder, repeats))
    if rank == 0:
        (folder / f"{ranks}.json").write_text(json.dumps(found))


def cases(ranks: int, folder: Path, repeats: int) -> Iterator[dict[str, Any]]:
    for heads in _HEADS:
        policy = PolicyModel(model(heads))
        policy.check_layouts(torch.device("cpu"))
        for name in _BATCHES:
            each, seconds, worked = batch(name), [], []
            for _ in range(repeats):
                policy.zero_grad()
                kept, began, before = Kept(policy), time.perf_counter(), time.process_time()
                with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
                    logprobs = policy(each, only=each.loss_mask)[0]
                logprobs.sum().backward()
                seconds.append(time.perf_counter() - began)
                worked.append(time.process_time() - before)
            # Each rank has the whole sum: theirs add up to `ranks` times its gradient.
            gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
            current_mesh().reduce(gradient, over="all").div_(ranks)
            stored = folder / f"{heads} {name}.safetensors"
            if ranks == 1:
                save_file({"logprobs": logprobs.detach(), "gradient": gradient}, stored)
            expected, wanted = (load_file(stored)[key] for key in ("logprobs", "gradient"))
            yield {
                "heads": heads, "batch": name, "ranks": ranks, "mebibytes": kept.mebibytes,
                "seconds": statistics.median(seconds), "worked": statistics.median(worked),
                "logprobs": float((logprobs.detach() - expected).abs().max()),
                "gradient": float((gradient - wanted).norm() / wanted.norm()),
            }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sequence_parallel", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks, the first 1")
    parser.add_argument("--repeats", type=int, default=3, help="passes of each case")
    parsed = parser.parse_args(arguments)
    shown = Table(
        "heads", "batch", "ranks", "kept, MiB a rank", "s a pass", "CPU s a rank", "log-probs off", "gradient off"
    )
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for ranks in parsed.ranks:
            store = host_store("127.0.0.1")
            processes = [
                get_context("fork").Process(
                    target=measure, args=(rank, ranks, f"127.0.0.1:{store.port}", folder, parsed.repeats)
                )
                for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            for case in json.loads((folder / f"{ranks}.json").read_text()):
                figures.setdefault(f"{case['heads']} heads, {case['batch']}", {})[f"ranks {ranks}"] = {
                    "mib": case["mebibytes"], "seconds": case["seconds"], "processor_seconds": case["worked"]
                }  # fmt: skip
                shown.add_row(
                    str(case["heads"]), case["batch"], str(ranks), f"{case['mebibytes']:.0f}",
                    f"{case['seconds']:.1f}", f"{case['worked']:.1f}",
                    f"{case['logprobs']:.1e}", f"{case['gradient']:.1e}",
                )  # fmt: skip
    Console(width=120).print(shown)
    store_figures(figures, seeds=[0])


if __name__ == "__main__":
    main()
