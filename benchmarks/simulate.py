"""Time of a GRPO step on 8 to 1,024 GPUs, by formulas: `python -m benchmarks.simulate [--json]`.

No cluster was measured. The formulas are in benchmarks/step_model.py; benchmarks.simulate_here compares them with runs
on one machine. Peaks are those of NVIDIA's data sheets; shares of them are measured on one H200
(docs/lab/2026-11-27.md#on-one-gpu) or assumed, and printed with the table. `--set NAME=VALUE` replaces a figure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.step_inputs import Hardware, Layout, Shape, Workload
from benchmarks.step_model import Part, Step, step

SHAPES = MappingProxyType(
    {
        "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151_936, tied=True),
        "qwen3-8b": Shape(36, 4096, 12_288, 32, 8, 128, 151_936, tied=False),
        "qwen3-32b": Shape(64, 5120, 25_600, 64, 8, 128, 151_936, tied=False),
        "llama3-70b": Shape(80, 8192, 28_672, 64, 8, 128, 128_256, tied=False),
    }
)
_MEASURED = {  # on one H200: share of the peak by GRPO's update (tree) and by RL with a reference; moving a trainer
    "training": 0.111, "scoring": 0.103, "host": 42e9,
}  # fmt: skip
_DRIVER = {"driver": 7.20 / 16.4e6}  # docs/lab/2026-11-28.md#the-driver-of-a-step, GRPO, one core
_ASSUMED = {
    "store": 2e9, "publish": 4e9, "prefill": 0.4, "decoding": 0.4, "reading": 0.6, "optimizer": 0.7, "links": 0.8,
    "link_latency": 1e-6, "network_latency": 5e-6, "engine_step": 0.015, "request": 2e-4, "call": 0.05,
}  # fmt: skip
_SHARES: Mapping[str, Any] = {**_MEASURED, **_DRIVER, **_ASSUMED, "node": 8, "block": 16}
# NVIDIA's data sheets of H100, H200 and A100 (SXM): bfloat16 without sparsity, memory, half of NVLink's bandwidth in
# both directions; of DGX H100, H200 and A100: one ConnectX of 400, 400 and 200 Gb/s for each GPU.
HARDWARE = MappingProxyType(
    {
        "h100": Hardware("H100 SXM", flops=989.4e12, memory=3.35e12, link=450e9, network=50e9, **_SHARES),
        "h200": Hardware("H200 SXM", flops=989.4e12, memory=4.8e12, link=450e9, network=50e9, **_SHARES),
        "a100": Hardware("A100 SXM 80 GB", flops=312e12, memory=2.039e12, link=300e9, network=25e9, **_SHARES),
    }
)
PHASES = ("sampling", "score", "update", "publish", "driver", "checkpoint")
_CHANGEABLE = tuple(field.name for field in fields(Hardware) if field.name != "name")


def layout_on(devices: int, options: argparse.Namespace) -> Layout:
    """Return the layout of `devices` GPUs. Raises ValueError if ranks and engines do not divide them."""
    common = {
        "asynchronous": options.asynchronous, "zero_stage": options.zero_stage, "recomputed": options.recomputed,
        "overlap": options.overlap, "transport": options.transport,
    }  # fmt: skip
    if options.training_share is None:
        return Layout(devices, devices, hybrid=True, **common)
    ranks = round(devices * options.training_share)
    engines, left = divmod(devices - ranks, options.engine_devices)
    if left or not ranks or not engines:
        raise ValueError(
            f"{devices} GPUs, of which {ranks} train, leave no whole engines of {options.engine_devices} GPUs"
        )
    return Layout(ranks, engines, options.engine_devices, **common)


def workload_on(devices: int, options: argparse.Namespace) -> Workload:
    prompts = options.prompts or round(options.prompts_per_gpu * devices)
    return Workload(
        SHAPES[options.model], prompts, options.group, options.prompt_tokens, options.longest, options.mean,
        scored=options.scored,
    )  # fmt: skip


def named(part: Part) -> str:
    return f"{part[0]}: {part[1]}"


def row(devices: int, workload: Workload, done: Step, first: tuple[float, Step]) -> dict[str, Any]:
    """Return a line of the table. first: sampled tokens per second and GPU, and step, of the smallest size."""
    rate = workload.sampled / done.seconds / devices
    return {
        "gpus": devices, "completions": len(workload.completions), "tokens": round(workload.tokens),
        **{phase: done.phases.get(phase, 0.0) for phase in PHASES}, "step": done.seconds,
        "sampled_tokens_per_second_and_gpu": rate, "efficiency": rate / first[0], "largest": named(done.largest),
        "grown_most": named(done.grown(first[1])) if done is not first[1] else None,
        "parts": {named(part): seconds for part, seconds in done.parts.items()},
    }  # fmt: skip


def simulate(hardware: Hardware, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    first: tuple[float, Step] | None = None
    for devices in options.gpus:
        workload = workload_on(devices, options)
        done = step(workload, layout_on(devices, options), hardware)
        first = first or (workload.sampled / done.seconds / devices, done)
        rows.append(row(devices, workload, done, first))
    return rows


def shown(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "GPUs", "completions", *(f"{phase}, s" for phase in PHASES), "step, s", "tokens/s/GPU", "efficiency",
        "largest", "grown most",
    )  # fmt: skip
    for each in rows:
        table.add_row(
            f"{each['gpus']:,}", f"{each['completions']:,}", *(f"{each[phase]:.1f}" for phase in (*PHASES, "step")),
            f"{each['sampled_tokens_per_second_and_gpu']:.0f}", f"{each['efficiency']:.0%}", str(each["largest"]),
            str(each["grown_most"] or ""),
        )  # fmt: skip
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", choices=HARDWARE, default="h100")
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 64, 256, 1024])
    parser.add_argument("--prompts-per-gpu", type=float, default=8.0, help="of a step, whatever the number of GPUs")
    parser.add_argument("--prompts", type=int, default=0, help="of a step, the same on any number of GPUs")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--mean", type=int, default=1024, help="tokens of a completion, geometric; 0: all the longest")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a completion")
    parser.add_argument("--scored", type=int, default=1, help="forwards of other models, such as the reference")
    parser.add_argument("--training-share", type=float, help="of the GPUs, the rest sample; without it: hybrid")
    parser.add_argument("--engine-devices", type=int, default=1, help="GPUs of an engine")
    parser.add_argument("--transport", choices=("folder", "collective"), default="folder")
    parser.add_argument("--asynchronous", action="store_true", help="sample beside training")
    parser.add_argument("--zero-stage", type=int, choices=(0, 2, 3), default=3)
    parser.add_argument("--recomputed", type=float, default=1.0, help="forwards in backward: 1 with checkpointing")
    parser.add_argument("--overlap", type=float, default=0.0, help="share of an update that hides communication")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help=", ".join(_CHANGEABLE))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def changed(hardware: Hardware, settings: Sequence[str]) -> Hardware:
    """Return `hardware` with the figures `NAME=VALUE`. Raises ValueError for a name that it does not have."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in _CHANGEABLE:
            raise ValueError(f"--set {name}: the hardware has {', '.join(_CHANGEABLE)}")
        values[name] = float(value)
    return replace(hardware, **values)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    hardware = changed(HARDWARE[options.hardware], options.set)
    rows = simulate(hardware, options)
    if options.json:
        print(json.dumps({"hardware": asdict(hardware), "options": vars(options), "rows": rows}, indent=1))
        return
    console = Console(width=200)
    console.print(f"{options.model}, {hardware.name}; a model of a step, no cluster was measured")
    given = [setting.partition("=")[0] for setting in options.set]
    for origin, figures in (
        ("measured on one H200", _MEASURED),
        ("measured on one CPU core", _DRIVER),
        ("assumed", _ASSUMED),
        ("given", dict.fromkeys(given)),
    ):
        listed = [name for name in figures if origin == "given" or name not in given]
        console.print(f"{origin}:", ", ".join(f"{name} {getattr(hardware, name):.3g}" for name in listed))
    console.print(shown(rows))


if __name__ == "__main__":
    main()
