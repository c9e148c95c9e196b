"""Memory and time of a student's divergence from its teacher, in chunks and whole: `python -m benchmarks.divergence`.

`whole` is the textbook form: log-softmax of all logits of both, and autograd. `chunked` is models/distillation.py,
from the teacher's head; `stored` the same from 64 log-probs of each row. Forward and backward, of the heads alone, with
the cross-entropy of the rows' own tokens. Each figure is from a process of its own, so that its peak is its own; memory
is the addition of the pass to inputs, weights and their gradients.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.logprobs import Result, machine, peak, reset_peak, timed
from benchmarks.record import store_figures
from rlhf_core.losses.divergence import forward_kl, jensen_shannon, reverse_kl, top_forward_kl
from rlhf_core.models.distillation import Taught, by_teacher, chunked_divergence
from rlhf_core.models.logprobs import log_distribution

# Tokens, words, widths of student and teacher.
SHAPES = ((2048, 32_000, 512, 1024), (1024, 151_936, 896, 2048))
TEMPERATURE, K = 2.0, 64
DIVERGENCES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": lambda student, teacher: jensen_shannon(student, teacher, weight=0.5),
}
Form = Literal["whole", "chunked", "stored"]


@dataclass(frozen=True, slots=True)
class Case:
    tokens: int
    vocabulary: int
    student: int  # width
    teacher: int
    dtype: Literal["float32", "bfloat16"]
    divergence: str
    form: Form
    repeats: int = 3


def whole(head: nn.Module, hidden: Tensor, targets: Tensor, teacher: Tensor, divergence: str) -> tuple[Tensor, Tensor]:
    """teacher: its logits."""
    logits = head(hidden).float()
    logprobs = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    q, p = (torch.log_softmax(each.float() / TEMPERATURE, dim=-1) for each in (logits, teacher))
    match divergence:
        case "forward_kl":
            return logprobs, (p.exp() * (p - q)).sum(-1)
        case "reverse_kl":
            return logprobs, (q.exp() * (q - p)).sum(-1)
        case _:
            m = torch.logaddexp(p, q) - math.log(2)
            return logprobs, ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / 2


def measure(case: Case) -> Result:
    """Run the case in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    options = {"device": device, "dtype": getattr(torch, case.dtype)}
    student, teacher = (
        nn.Linear(width, case.vocabulary, bias=False, **options) for width in (case.student, case.teacher)
    )
    student_hidden, teacher_hidden = (
        torch.randn(case.tokens, width, **options) for width in (case.student, case.teacher)
    )
    targets = torch.randint(case.vocabulary, (case.tokens,), device=device)
    student_hidden.requires_grad_()
    for tensor in (student.weight, student_hidden):
        tensor.grad = torch.zeros_like(tensor)
    teacher.requires_grad_(False)
    taught = _stored(teacher, teacher_hidden) if case.form == "stored" else _run(case, teacher, teacher_hidden)

    def run() -> float:
        if case.form == "whole":
            results = whole(student, student_hidden, targets, teacher(teacher_hidden), case.divergence)
        else:
            results = chunked_divergence(student, student_hidden, targets, taught, vocabulary=case.vocabulary)
        torch.stack(results).sum().backward()
        return float(results[1].detach().mean())

    start = reset_peak()
    seconds, processor, means = zip(*(timed(run) for _ in range(case.repeats)), strict=True)
    return Result(statistics.median(seconds), statistics.median(processor), peak() - start, means[0])


def _run(case: Case, head: nn.Module, hidden: Tensor) -> Taught:
    return by_teacher(DIVERGENCES[case.divergence], head, hidden, TEMPERATURE)


def _stored(head: nn.Module, hidden: Tensor) -> Taught:
    parts = []
    for rows in hidden.split(64):
        distribution = log_distribution(head(rows), TEMPERATURE)
        logprobs, tokens = distribution.topk(K)
        rest = distribution.scatter_(-1, tokens, -math.inf).logsumexp(-1, keepdim=True)
        parts.append((tokens, torch.cat([logprobs, rest], dim=-1)))
    columns = tuple(torch.cat(list(column)) for column in zip(*parts, strict=True))
    return Taught(columns, top_forward_kl, TEMPERATURE)


def in_own_process(case: Case) -> Result:
    command = [sys.executable, "-m", "benchmarks.divergence", json.dumps(asdict(case))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Result(**json.loads(output))


def main(arguments: list[str]) -> None:
    if arguments:
        print(json.dumps(asdict(measure(Case(**json.loads(arguments[0]))))))
        return
    console = Console(width=120)
    console.print(machine())
    table = Table("tokens x vocabulary", "dtype", "divergence", "MiB whole, ours", "ratio", "CPU s whole, ours")
    figures: dict[str, dict[str, dict[str, dict[str, object]]]] = {}
    for tokens, vocabulary, student, teacher in SHAPES:
        for dtype in ("float32", "bfloat16"):
            for divergence in (*DIVERGENCES, "stored"):
                of_both = divergence if divergence in DIVERGENCES else "forward_kl"
                forms: tuple[Form, Form] = ("whole", "chunked" if divergence == of_both else "stored")
                results = [
                    in_own_process(Case(tokens, vocabulary, student, teacher, dtype, of_both, form)) for form in forms
                ]
                if divergence == of_both and not math.isclose(results[0].mean, results[1].mean, rel_tol=1e-4):
                    raise SystemExit(f"the forms differ: {results[0].mean} and {results[1].mean}")
                whole, ours = results
                figures.setdefault(f"{tokens} x {vocabulary}", {}).setdefault(dtype, {})[divergence] = {
                    "mib": [whole.peak / 2**20, ours.peak / 2**20],
                    "processor_seconds": [whole.processor, ours.processor],
                    "memory_of_whole": ours.peak / whole.peak,
                    "processor_of_whole": ours.processor / whole.processor,
                }
                table.add_row(
                    f"{tokens} x {vocabulary}", dtype, divergence,
                    ", ".join(f"{result.peak / 2**20:.0f}" for result in results),
                    f"{results[1].peak / results[0].peak:.2f}",
                    ", ".join(f"{result.processor:.2f}" for result in results),
                )  # fmt: skip
    console.print(table)
    console.print(f"load average at the end {os.getloadavg()[0]:.1f}")
    store_figures(figures)


if __name__ == "__main__":
    main(sys.argv[1:])
