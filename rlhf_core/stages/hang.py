"""A job that has hung: the stacks of its processes become an artifact, and the job ends, to be started again."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.watchdog import WatchdogConfig
from rlhf_core.contract import Output
from rlhf_core.errors import StoreError, reason_of
from rlhf_core.stages.attempt import RecordedAttempt
from rlhf_core.stages.job_context import JobContext
from rlhf_core.system.scratch import scratch_folder
from rlhf_core.system.watchdog import WATCHDOG

if TYPE_CHECKING:
    from rlhf_core.stages.cluster import Cluster

STACKS_FILE = "stacks.txt"

Stop = Callable[[str], None]  # ends this process, with a reason


@contextmanager
def watched(
    spec: StageSpec, context: JobContext, attempt: RecordedAttempt, clusters: Sequence[Cluster], stop: Stop | None
) -> Iterator[None]:
    """Stop this job once a phase of it has hung. clusters: with its actors."""
    if spec.watchdog is None or stop is None:
        yield
        return

    def hung(reason: str) -> None:
        print(f"{reason}; reading the stacks of all processes", flush=True)
        try:
            stacks = {name: text for each in clusters for name, text in each.stacks().items()}
            ref = context.publish("stacks", attempt.times_stuck + 1, _output(folder, stacks))
            reason = f"{reason}; the stacks of its processes are in {ref}"
        except Exception as error:  # of a store or a cluster in whatever state: the job must end all the same
            reason = f"{reason}; the stacks of its processes could not be stored ({reason_of(error)})"
        try:
            attempt.stuck(reason)
        except StoreError as error:
            print(f"the end of this attempt could not be stored: {error}", flush=True)
        stop(reason)

    settings: WatchdogConfig = WatchdogConfig.model_validate(spec.watchdog)
    with scratch_folder("stacks") as folder, WATCHDOG.watching(settings.factor, 60 * settings.minutes, hung):
        yield


def _output(folder: Path, stacks: Mapping[str, str]) -> Output:
    with (folder / STACKS_FILE).open("w+", encoding="utf-8") as file:
        print(f"job, process {os.getpid()}", file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0, os.SEEK_END)
        for name, text in stacks.items():
            print(f"\n{name}\n{text.strip()}", file=file)
    return Output(Kind.STACKS, folder, {"processes": 1 + len(stacks)})
