"""One thin Prefect task per stage: it displays the progress of tasks/stage.py, and adds nothing to it.

Prefect's own result cache stays off. The store is the truth: a query takes milliseconds, works with a wiped Prefect
database, and an artifact that was deleted is computed again. So a Retry in the UI runs the flow's body again, and
every finished stage returns at once.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from uuid import UUID

from prefect import Task, get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled, Completed

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import AlignmentError, reason_of, shortened
from rlhf_core.graph.graph import Node
from rlhf_core.pipeline.specs import RunSettings
from rlhf_core.tracking.protocol import Progress
from tasks.job_end import JobCancelledError
from tasks.ray_jobs import RayJobs
from tasks.stage import run_stage

PROGRESS_SECONDS = 1.0  # between two updates of one progress artifact
_LONGEST_REASON = 1000  # characters, of a stage that failed


class StageRunner:
    """State shared by the tasks of one flow run. Not a dataclass: Prefect searches those for futures."""

    def __init__(
        self,
        settings: RunSettings,
        nodes: Mapping[str, Node],
        repository: ArtifactRepository,
        jobs: RayJobs,
        cancel: threading.Event,
        stuck: Callable[[str], None] = lambda reason: None,
    ):
        """cancel: once set, every task stops its job and returns. stuck: gets the reason of a job that has hung."""
        self.settings = settings
        self.nodes = nodes
        self.repository = repository
        self.jobs = jobs
        self.cancel = cancel
        self.stuck = stuck


class _PrefectWatcher:
    """Shows a job's lines in the task's log and its progress as an artifact of the task."""

    def __init__(self, node: str, runner: StageRunner, clock: Callable[[], float] = time.monotonic):
        self._node = node
        self._runner = runner
        self._clock = clock
        self._logger = get_run_logger()
        self._artifact: UUID | None = None
        self._shown_at = -PROGRESS_SECONDS
        self._waiting: Progress | None = None  # the newest, not shown yet
        self._percent = 0.0

    def submitted(self, job_id: str, attached: bool) -> None:
        what = "attached to the running job" if attached else "submitted the job"
        self._logger.info("%s %s; %s", what, job_id, self._runner.jobs.where_is_the_log(job_id))

    def line(self, line: str) -> None:
        self._logger.info("%s", line)

    def stuck(self, reason: str) -> None:
        self._runner.stuck(f"{self._node}: {reason}")

    def progress(self, progress: Progress) -> None:
        self._waiting = progress
        if self._clock() - self._shown_at >= PROGRESS_SECONDS:
            self._show()

    def cancelled(self) -> bool:
        if self._waiting is not None and self._clock() - self._shown_at >= PROGRESS_SECONDS:
            self._show()
        return self._runner.cancel.is_set()

    def done(self) -> None:
        """Set the progress to the last step; a job's last message may be of an earlier one."""
        if self._waiting is not None or self._artifact is not None:
            self._put(100.0, "done")

    def ended(self, why: str) -> None:
        """Show the reason of a failure on the page of the run, where a person looks first."""
        if self._waiting is not None:
            self._show()
        self._put(self._percent, shortened(why, _LONGEST_REASON))

    def _show(self) -> None:
        progress, self._waiting = self._waiting, None
        if progress is None:
            return
        self._shown_at = self._clock()
        self._put(progress.percent, str(progress))

    def _put(self, percent: float, text: str) -> None:
        self._percent, described = percent, f"**{self._node}** {text}"
        if self._artifact is None:
            artifact_id = create_progress_artifact(
                percent, key=progress_artifact_key(self._node), description=described
            )
            assert isinstance(artifact_id, UUID), "synchronous, since no event loop runs in a task's thread"
            self._artifact = artifact_id
        else:
            update_progress_artifact(self._artifact, percent, description=described)


def progress_artifact_key(node: str) -> str:
    """Return an artifact key, which may have lower-case letters, digits and dashes only."""
    return "progress-" + re.sub(r"[^a-z0-9]+", "-", node.lower())


def _compute_node(node_name: str, runner: StageRunner) -> Any:
    """Run a task's body; return the task's state, with a StageResult as its data."""
    node = runner.nodes[node_name]
    watcher = _PrefectWatcher(node_name, runner)
    try:
        result = run_stage(node, runner.settings, runner.repository, runner.jobs, watcher)
    except JobCancelledError as cancelled:
        watcher.ended(str(cancelled).removeprefix(f"{node_name}: "))
        return Cancelled(message=str(cancelled))
    except AlignmentError as error:
        watcher.ended(f"failed: {str(error).removeprefix(f'{node_name}: ')}")
        raise
    except Exception as error:  # of a library: the run's page shows every cause
        watcher.ended(f"failed: {type(error).__name__}: {reason_of(error)}")
        raise
    watcher.done()
    if result.reused:
        return Completed(name="Reused", message=f"{node.ref} was in the store", data=result)
    return Completed(name="Computed", message=f"{node.ref} in {result.seconds:.0f} s", data=result)


@cache
def stage_task(stage: str) -> Task[Any, Any]:
    """Return the task of a stage by its name. A failed stage is not retried automatically: it would fail again for the
    same reason, after the same GPU hours."""
    named = task(name=stage, task_run_name="{node_name}", cache_policy=NO_CACHE, persist_result=False)
    return named(_compute_node)
