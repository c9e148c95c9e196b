"""Cost of a publish and its proof by size of the weights: `python -m benchmarks.publish`.

One training rank and one engine, each a Ray actor of its own on this machine, as in the RL stage. Nothing is
trained in between. Seconds are medians, measured at the driver.

`python -m benchmarks.publish transports`: 1 GiB over each transport, between two processes in turn.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.grpo_ours import config
from benchmarks.grpo_workload import GRPOWorkload
from benchmarks.logprobs import machine
from benchmarks.record import store_figures
from benchmarks.stage_alone import FolderContext, stage_input
from benchmarks.word_models import make_model
from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.packing import pack
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rollout.engine import RolloutEngine
from rlhf_core.rollout.proof import Expected, default_tolerance, verify_weights
from rlhf_core.rollout.transport.base import Offer, WeightManifest, Weights, digested
from rlhf_core.rollout.transport.table import TRANSPORTS
from rlhf_core.stages.ray_cluster import RayCluster
from rlhf_core.stages.rl import ranks_and_engines
from rlhf_core.training.distributed import host_store

CASES = (("1m", "float32"), ("25m", "float32"), ("25m", "bfloat16"), ("135m", "float32"), ("135m", "bfloat16"))
REPEATS = 5
PROBE = [tuple(range(5, 37))] * 4  # as many prompts as the stage takes
MATRICES = (1024, 4096, 11008)  # columns, of four each
PHASES = ("write", "load", "read back", "log-probs", "read whole")


@dataclass(frozen=True, slots=True)
class Result:
    size: int  # bytes of the weights
    seconds: dict[str, float]  # of each phase


def measure(workload: GRPOWorkload, model: Path, repeats: int) -> Result:
    """Measure the phases of a publish.

    write: gather, lay down in shared memory, digest. load: by the engine. read back: columns of the served weights, and
    digest. log-probs: of the probe, by trainer and engine. read whole: instead of columns, as every
    `rollout.read_back_every` publishes.
    """
    inputs = {"model": stage_input(model, Kind.POLICY)}
    context = FolderContext(model.parent, {each.manifest.ref.path: each for each in inputs.values()})
    settings = config(workload, "ours")
    rollout = settings.rollout.model_copy(update={"read_back_every": 2})
    settings = settings.model_copy(update={"rollout": rollout})
    taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
    with ranks_and_engines(settings, inputs, context, RayCluster()) as (workers, engines, _):
        trainer = PolicyTrainer(settings, build_algorithm(settings), workers, seed=0)
        for version in range(1, 2 * repeats + 1):
            read_back = taken["read back" if version % 2 else "read whole"]
            with _timed(taken["log-probs"]):
                logprobs = trainer.probe(pack(PROBE, [[True] * len(sequence) for sequence in PROBE]))
            began = time.perf_counter()
            with trainer.publication(version) as weights:
                taken["write"].append(time.perf_counter() - began)
                size = sum(file.nbytes for file in weights.files().values())
                with _timed(taken["load"]):
                    engines.publish(weights)
            with _timed(read_back):
                engines.call(RolloutEngine.probe, [])
            began = time.perf_counter()
            length = len(PROBE[0])
            expected = [list(logprobs[i : i + length]) for i in range(0, len(logprobs), length)]
            answers = engines.call(RolloutEngine.probe, PROBE)
            published = Expected(version, expected, weights.manifest.digests)
            verify_weights(answers, published, default_tolerance(workload.dtype))
            taken["log-probs"][-1] += max(0.0, time.perf_counter() - began - read_back[-1])
    return Result(size, {phase: statistics.median(seconds) for phase, seconds in taken.items()})


@contextmanager
def _timed(into: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    into.append(time.perf_counter() - began)


def table(results: Sequence[tuple[GRPOWorkload, Result]]) -> Table:
    figures = Table("model", "dtype", "MiB", *PHASES, "publish and proof", "MiB/s")
    for workload, result in results:
        total = sum(seconds for phase, seconds in result.seconds.items() if phase != "read whole")
        figures.add_row(
            workload.size, workload.dtype, f"{result.size / 2**20:.1f}",
            *(f"{result.seconds[phase]:.3f}" for phase in PHASES), f"{total:.3f}", f"{result.size / 2**20 / total:.0f}",
        )  # fmt: skip
    return figures


Taken = tuple[float, float]  # seconds of a publish, and processor seconds of both ends


def matrices(gib: float = 1.0) -> dict[str, torch.Tensor]:
    """Return random weights of `gib` in bfloat16."""
    rows = round(gib * 2**30 / (4 * 2 * sum(MATRICES)))
    return {f"matrix{i}.{n}": torch.randn(rows, n, dtype=torch.bfloat16) for i in range(4) for n in MATRICES}


def measure_transports(repeats: int, gib: float = 1.0) -> dict[str, list[Taken]]:
    """Return what each publish of `gib` in bfloat16 takes, from the first tensor to the last loaded, by transport.

    Both ends compute digests, as ranks and engines do; the receiver copies each tensor into its model.
    """
    torch.set_num_threads(1)
    weights = matrices(gib)
    manifest = WeightManifest.of(1, weights)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(theirs,), daemon=True)
    receiver.start()
    taken: dict[str, list[Taken]] = {name: [] for name in TRANSPORTS}
    offer = Offer(manifest, 1, 1, False, 1, None, rendezvous=lambda: host_store("127.0.0.1"))
    for _ in range(1 + repeats):  # the first is not counted
        for name, offered in TRANSPORTS.items():
            digests: dict[str, str] = {}
            with offered(offer) as transport:
                began, computed = time.perf_counter(), time.process_time()
                if transport.concurrent:
                    ours.send((transport, manifest))
                transport.send(digested(weights.items(), digests), manifest)
                if not transport.concurrent:
                    ours.send((transport, manifest))
                received, theirs_computed = ours.recv()
                computed = time.process_time() - computed + theirs_computed
                taken[name].append((time.perf_counter() - began, computed))
            assert received == digests
    receiver.kill()
    return {name: seconds[1:] for name, seconds in taken.items()}


def _receive(pipe: Any) -> None:
    model: dict[str, torch.Tensor] = {}
    while True:
        transport, manifest = pipe.recv()
        began = time.process_time()
        digests = load(model, transport.receive(manifest))
        pipe.send((digests, time.process_time() - began))


def load(model: dict[str, torch.Tensor], weights: Weights) -> dict[str, str]:
    """Copy `weights` into `model`, and return their digests."""
    digests: dict[str, str] = {}
    for name, tensor in digested(weights, digests):
        model.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
    return digests


def transport_table(taken: Mapping[str, Sequence[Taken]]) -> Table:
    """Medians, and the median of the ratios to the folder's in the same turn, with the least and the most."""
    figures = Table("transport", "seconds", "of the folder's", "least, most", "CPU s", "of the folder's", "least, most")
    for name, of_each in taken.items():
        cells = []
        for values, of_folder in zip(zip(*of_each, strict=True), zip(*taken["folder"], strict=True), strict=True):
            ratios = [value / folder for value, folder in zip(values, of_folder, strict=True)]
            cells += [f"{statistics.median(values):.2f}", f"{statistics.median(ratios):.2f}"]
            cells += [f"{min(ratios):.2f}, {max(ratios):.2f}"]
        figures.add_row(name, *cells)
    return figures


def main(arguments: Sequence[str]) -> int:
    """Arguments: sizes, or `transports`; none: all sizes."""
    console = Console(width=120)
    console.print(machine())
    if "transports" in arguments:
        taken = measure_transports(REPEATS)
        console.print(transport_table(taken))
        store_figures({name: _of_folder(each, taken["folder"]) for name, each in taken.items()})
        return 0
    results = []
    for size, dtype in CASES:
        if not arguments or size in arguments:
            workload = GRPOWorkload(size, dtype)  # type: ignore[arg-type]
            with tempfile.TemporaryDirectory(prefix="publish-") as name:
                model = Path(name) / "model"
                make_model(workload.shape, model)
                results.append((workload, measure(workload, model, REPEATS)))
    console.print(table(results))
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for workload, result in results:
        whole = sum(seconds for phase, seconds in result.seconds.items() if phase != "read back")
        seconds = whole - result.seconds["read whole"] + result.seconds["read back"]
        figures.setdefault(workload.size, {})[workload.dtype] = {"seconds": seconds, "read_whole_seconds": whole}
    store_figures(figures)
    return 0


def _of_folder(taken: Sequence[Taken], folder: Sequence[Taken]) -> dict[str, float]:
    ratios = [own / theirs for (own, _), (theirs, _) in zip(taken, folder, strict=True)]
    return {"seconds": statistics.median(own for own, _ in taken), "of_folder": statistics.median(ratios)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
