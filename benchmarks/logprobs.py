"""Memory and time of chunked log-probs, plain ones, and chunked ones by autograd: `python -m benchmarks.logprobs`.

Each figure is from a process of its own, so that its peak is its own. Memory is the addition of the pass to the process
(on a GPU: to torch's allocations), without inputs, weights and their gradients. `train` is forward and backward of
log-probs and entropy, `score` a forward of log-probs without gradients.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.record import commit, device, store_figures
from rlhf_core.models.logprobs import CHUNK_ELEMENTS, chunked_logprobs

# Tokens, words, width; the last two have the heads of SmolLM2-135M and Qwen2.5-0.5B.
SHAPES = ((2048, 32_000, 512), (2048, 49_152, 576), (1024, 151_936, 896))
TEMPERATURE = 0.7
FORMS: tuple[Literal["plain", "autograd", "chunked"], ...] = ("plain", "autograd", "chunked")


@dataclass(frozen=True, slots=True)
class Case:
    tokens: int
    vocabulary: int
    hidden: int
    dtype: Literal["float32", "bfloat16"]
    work: Literal["train", "score"]
    form: Literal["plain", "autograd", "chunked"]
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Result:
    seconds: float  # of the wall clock, median of the repeats
    processor: float  # seconds of the processor, of all threads: least sensitive to a busy machine
    peak: int  # bytes
    mean: float  # of the log-probs, to see that both forms compute the same


def plain_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor, *, with_entropy: bool) -> list[Tensor]:
    """Compute the textbook form: the whole (tokens, vocabulary) distribution at once."""
    distribution = torch.log_softmax(head(hidden).float() / TEMPERATURE, dim=-1)
    logprobs = distribution.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return [logprobs, -(distribution.exp() * distribution).sum(-1)] if with_entropy else [logprobs]


def autograd_logprobs(head: nn.Linear, hidden: Tensor, targets: Tensor, *, with_entropy: bool) -> list[Tensor]:
    """Compute chunks like ours, whose log-softmax, division and `gather` have gradients of their own."""
    vocabulary = head.weight.shape[0]
    chunks = math.ceil(hidden.shape[0] * vocabulary / CHUNK_ELEMENTS)
    parts = []
    for pair in zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True):
        chunk = partial(plain_logprobs, with_entropy=with_entropy)
        keeps = chunks == 1 or not torch.is_grad_enabled()
        parts.append(chunk(head, *pair) if keeps else checkpoint(chunk, head, *pair, use_reentrant=False))
    return [torch.cat(list(results)) for results in zip(*parts, strict=True)]


def measure(case: Case) -> Result:
    """Run the case in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    head = nn.Linear(case.hidden, case.vocabulary, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(case.tokens, case.hidden, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(case.vocabulary, (case.tokens,), device=device)
    with_entropy = case.work == "train"
    # The gradients' own memory is the weights' own size in both forms: it is there before.
    for tensor in (head.weight, hidden):
        tensor.grad = torch.zeros_like(tensor)

    def run() -> float:
        with torch.set_grad_enabled(case.work == "train"):
            if case.form != "chunked":
                form = plain_logprobs if case.form == "plain" else autograd_logprobs
                results = form(head, hidden, targets, with_entropy=with_entropy)
            else:
                logprobs, entropy = chunked_logprobs(
                    head, hidden, targets, vocabulary=case.vocabulary, temperature=TEMPERATURE,
                    with_entropy=with_entropy,
                )  # fmt: skip
                results = [logprobs] if entropy is None else [logprobs, entropy]
            if case.work == "train":
                torch.stack([result.sum() for result in results]).sum().backward()
        return float(results[0].detach().mean())

    start = reset_peak()
    seconds, processor, means = zip(*(timed(run) for _ in range(case.repeats)), strict=True)
    return Result(statistics.median(seconds), statistics.median(processor), peak() - start, means[0])


def timed(run: Callable[[], float]) -> tuple[float, float, float]:
    started, processor = time.perf_counter(), time.process_time()
    mean = run()  # a number on the host: the device has finished
    return time.perf_counter() - started, time.process_time() - processor, mean


def reset_peak() -> int:
    """Return the bytes in use now, and start a new `peak`."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def in_own_process(case: Case) -> Result:
    command = [sys.executable, "-m", "benchmarks.logprobs", json.dumps(asdict(case))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Result(**json.loads(output))


def machine() -> str:
    """Describe this machine, and its load."""
    return (
        f"{device()}; torch {torch.__version__}, {torch.get_num_threads()} threads; commit {commit()}; "
        f"nice {os.nice(0)}; load average {os.getloadavg()[0]:.1f}"
    )


def main(arguments: list[str]) -> None:
    if arguments:
        print(json.dumps(asdict(measure(Case(**json.loads(arguments[0]))))))
        return
    console = Console(width=120)
    console.print(machine())
    table = Table(
        "tokens x vocabulary", "dtype", "work", *(f"{what}: {', '.join(FORMS)}" for what in ("MiB", "s", "CPU s"))
    )
    figures: dict[str, dict[str, dict[str, dict[str, dict[str, float]]]]] = {}
    for tokens, vocabulary, hidden in SHAPES:
        for dtype in ("float32", "bfloat16"):
            for work in ("train", "score"):
                results = [in_own_process(Case(tokens, vocabulary, hidden, dtype, work, form)) for form in FORMS]
                for result in results:
                    if not math.isclose(results[0].mean, result.mean, rel_tol=1e-6):
                        raise SystemExit(f"the forms differ: mean log-prob {results[0].mean} and {result.mean}")
                figures.setdefault(f"{tokens} x {vocabulary}", {}).setdefault(dtype, {})[work] = {
                    form: {"mib": result.peak / 2**20, "seconds": result.seconds, "processor_seconds": result.processor}
                    for form, result in zip(FORMS, results, strict=True)
                }
                table.add_row(
                    f"{tokens} x {vocabulary}", dtype, work,
                    ", ".join(f"{result.peak / 2**20:.0f}" for result in results),
                    ", ".join(f"{result.seconds:.2f}" for result in results),
                    ", ".join(f"{result.processor:.2f}" for result in results),
                )  # fmt: skip
    console.print(table)
    console.print(f"load average at the end {os.getloadavg()[0]:.1f}")
    store_figures(figures)


if __name__ == "__main__":
    main(sys.argv[1:])
