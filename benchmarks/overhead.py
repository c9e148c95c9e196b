"""Share of each stage's time that is neither sampling nor training: `python -m benchmarks.overhead [RUN ID]`.

Reads a run's record, and the manifests and metrics of its stages, from the store of ALIGNMENT_STORE (or the
local stack's); without a RUN ID the newest run. A reused stage is shown as of its computation.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import AlignmentError, StoreError
from rlhf_core.pipeline.record import NodeRecord, RunRecord, read_record
from rlhf_core.tracking.protocol import METRICS_FILE

WORK_PHASES = ("seconds/rollout", "seconds/score", "seconds/update")
# Limits of a run's waiting on two idle cores: for the whole stage, and its first step. Seconds from its submission.
AIMS_WHOLE = {"dataset": 3.0, "base": 3.0, "merge": 3.0, "report": 3.0}
AIMS_FIRST_STEP = {"pretrain": 12.0, "sft": 12.0, "reward_model": 12.0, "rl": 15.0}
AIM_DEMO = 150.0  # the recipe `tiny`, every stage computed

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of one stage; None if it logs no steps, such as datasets and merges."""

    name: str
    job: float  # from the job's start, lease in hand, to its end, before it publishes
    work: float | None  # sampling and training
    start_up: float | None  # from the job's start to that of its first step
    around: float | None  # waiting beyond the job: submission, publishing; None for a reused stage
    stage: str = ""

    @property
    def aim(self) -> float | None:
        return AIMS_WHOLE.get(self.stage, AIMS_FIRST_STEP.get(self.stage))

    @property
    def waited(self) -> float | None:
        """The measure of `aim`. For a first step it includes the time after the stage, which cannot be separated."""
        counted = self.job if self.stage in AIMS_WHOLE else self.start_up
        return None if self.aim is None or counted is None or self.around is None else counted + self.around

    @property
    def share(self) -> float | None:
        """Share of the job's time that is neither sampling nor training."""
        return None if self.work is None or self.job <= 0 else max(0.0, 1 - self.work / self.job)


def measure(manifest: Manifest, lines: Sequence[Line], record: NodeRecord | None = None) -> Overhead:
    """Measure a stage. lines: of its metrics.jsonl. record: the run's entry of the stage."""
    job = (manifest.finished_at - manifest.started_at).total_seconds()
    # Lines of an attempt that was killed, which this one went on from, are older than it.
    steps = [step for step in _steps(lines) if step[0] > manifest.started_at.timestamp()]
    around = record.seconds - job if record is not None and record.outcome == "computed" else None
    if not steps:
        return Overhead(manifest.name, job, None, None, around, manifest.stage)
    (ended, whole, _), *_ = steps
    start_up = ended - whole - manifest.started_at.timestamp()
    return Overhead(manifest.name, job, sum(work for _, _, work in steps), start_up, around, manifest.stage)


def _steps(lines: Sequence[Line]) -> Iterator[tuple[float, float, float]]:
    """Yield, for each line about steps, their end (UNIX seconds), their duration, and the part of it that was work."""
    tokens = 0.0
    for line in lines:
        phases = {name: seconds for name, seconds in line.items() if name.startswith("seconds/")}
        if phases:  # an RL step
            yield line["time"], sum(phases.values()), sum(phases.get(name, 0.0) for name in WORK_PHASES)
        elif "tokens_per_second" in line:  # supervised steps since the last line
            seconds = (line["tokens"] - tokens) / line["tokens_per_second"]
            tokens = line["tokens"]
            yield line["time"], seconds, seconds
        elif "sampling_seconds" in line:  # an evaluation
            yield line["time"], line["sampling_seconds"], line["sampling_seconds"]


def measure_run(repository: ArtifactRepository, record: RunRecord) -> list[Overhead]:
    """Return the overhead of every stage of the run whose artifact is in the store, in the run's order."""
    overheads = []
    with tempfile.TemporaryDirectory() as cache:
        for node in record.nodes:
            manifest = repository.manifest(node.ref)
            if manifest is not None:
                overheads.append(measure(manifest, _lines(repository, manifest, Path(cache)), node))
    return overheads


def _lines(repository: ArtifactRepository, manifest: Manifest, cache: Path) -> list[Line]:
    if all(file.path != METRICS_FILE for file in manifest.files):
        return []
    folder = repository.fetch(manifest.ref, cache, only=[METRICS_FILE])
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()]


def find_run(store: Store, run_id: str | None) -> RunRecord:
    """Return the run `run_id`, or the one that ended last. Raises StoreError if there is none."""
    ids = [run_id] if run_id else [path.split("/")[1] for path in store.list("runs/") if path.endswith("/run.json")]
    records = [record for record in (read_record(store, each) for each in ids) if record is not None]
    if not records:
        raise StoreError(f"{store.url} has no run {run_id or 'yet'}: `alignment run tiny` makes one")
    return max(records, key=lambda record: record.finished_at)


def table(record: RunRecord, stages: Sequence[Overhead]) -> Table:
    shown = Table(
        title=f"{record.recipe['name']}, run {record.run_id}",
        caption="other = job - work - until first step; waited: for the whole stage, or from its submission until its "
        "first step",
    )
    shown.add_column("stage")
    for column in (
        "job",
        "sampling, training",
        "until first step",
        "other",
        "overhead",
        "around the job",
        "waited",
        "aim",
    ):
        shown.add_column(column, justify="right")
    for stage in stages:
        other = None if stage.work is None or stage.start_up is None else stage.job - stage.work - stage.start_up
        share = "–" if stage.share is None else f"{stage.share:.0%}"
        shown.add_row(
            stage.name,
            _seconds(stage.job),
            _seconds(stage.work),
            _seconds(stage.start_up),
            _seconds(other),
            share,
            _seconds(stage.around),
            *_against(stage.waited, stage.aim),
        )
    jobs, work = sum(stage.job for stage in stages), sum(stage.work or 0.0 for stage in stages)
    whole = f"{max(0.0, 1 - work / jobs):.0%}" if jobs else "–"
    shown.add_section()
    shown.add_row("all jobs", _seconds(jobs), _seconds(work), "", "", whole, "", "", "")
    computed = all(node.outcome == "computed" for node in record.nodes)
    aim = AIM_DEMO if computed and record.recipe["name"] == "tiny" else None
    wall = (record.finished_at - record.started_at).total_seconds()
    shown.add_row("the run", _seconds(wall), "", "", "", "", "", *_against(wall if aim else None, aim))
    return shown


def _against(waited: float | None, aim: float | None) -> tuple[str, str]:
    if aim is None:
        return "–", "–"
    late = waited is not None and waited >= aim
    return f"[red]{_seconds(waited)}[/red]" if late else _seconds(waited), f"< {aim:.0f} s"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def main(arguments: Sequence[str]) -> int:
    from deployments.stack.environment import load_stack_environment

    try:
        load_stack_environment()
        store = open_store(store_url())
        record = find_run(store, arguments[0] if arguments else None)
        Console().print(table(record, measure_run(ArtifactRepository(store), record)))
    except AlignmentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
