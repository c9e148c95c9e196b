"""One thin Prefect task per stage: it displays the progress of tasks/stage.py, and adds nothing to it.

Prefect's own result cache stays off. The store is the truth: a query takes milliseconds, works with a wiped Prefect
database, and an artifact that was deleted is computed again. So a Retry in the UI runs the flow's body again, and
every finished stage returns at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled, Completed

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import AlignmentError, reason_of
from rlhf_core.graph.graph import Node
from rlhf_core.pipeline.specs import RunSettings
from rlhf_core.tracking.protocol import Progress
from tasks.job_end import JobCancelledError
from tasks.ray_jobs import RayJobs
from tasks.run_progress import RunProgress, StageProgress
from tasks.stage import run_stage


class StageRunner:
    """State shared by the tasks of one flow run. Not a dataclass: Prefect searches those for futures."""

    def __init__(
        self,
        settings: RunSettings,
        nodes: Mapping[str, Node],
        repository: ArtifactRepository,
        jobs: RayJobs,
        cancel: threading.Event,
        progress: RunProgress,
        stuck: Callable[[str], None] = lambda reason: None,
    ):
        """cancel: once set, every task stops its job and returns. stuck: gets the reason of a job that has hung."""
        self.settings = settings
        self.nodes = nodes
        self.repository = repository
        self.jobs = jobs
        self.cancel = cancel
        self.progress = progress
        self.stuck = stuck


class _PrefectWatcher:
    """Shows a job's lines in the task's log, and its progress in the artifact of the run."""

    def __init__(self, node: str, runner: StageRunner):
        self._node = node
        self._runner = runner
        self._logger = get_run_logger()

    def submitted(self, job_id: str, attached: bool) -> None:
        what = "attached to the running job" if attached else "submitted the job"
        self._logger.info("%s %s; %s", what, job_id, self._runner.jobs.where_is_the_log(job_id))

    def line(self, line: str) -> None:
        self._logger.info("%s", line)

    def stuck(self, reason: str) -> None:
        self._runner.stuck(f"{self._node}: {reason}")

    def progress(self, progress: Progress) -> None:
        self._runner.progress.report(self._node, StageProgress(progress.percent, str(progress)))

    def cancelled(self) -> bool:
        self._runner.progress.refresh()
        return self._runner.cancel.is_set()


def _compute_node(node_name: str, runner: StageRunner) -> Any:
    """Run a task's body; return the task's state, with a StageResult as its data."""
    node = runner.nodes[node_name]
    watcher = _PrefectWatcher(node_name, runner)
    try:
        result = run_stage(node, runner.settings, runner.repository, runner.jobs, watcher)
    except JobCancelledError as cancelled:
        runner.progress.end(node_name, str(cancelled).removeprefix(f"{node_name}: "), failed=True)
        return Cancelled(message=str(cancelled))
    except AlignmentError as error:
        runner.progress.end(node_name, f"failed: {str(error).removeprefix(f'{node_name}: ')}", failed=True)
        raise
    except Exception as error:  # of a library: the run's page shows every cause
        runner.progress.end(node_name, f"failed: {type(error).__name__}: {reason_of(error)}", failed=True)
        raise
    runner.progress.end(node_name, "reused" if result.reused else "done")
    if result.reused:
        return Completed(name="Reused", message=f"{node.ref} was in the store", data=result)
    return Completed(name="Computed", message=f"{node.ref} in {result.seconds:.0f} s", data=result)


@cache
def stage_task(stage: str) -> Task[Any, Any]:
    """Return the task of a stage by its name. A failed stage is not retried automatically: it would fail again for the
    same reason, after the same GPU hours."""
    named = task(name=stage, task_run_name="{node_name}", cache_policy=NO_CACHE, persist_result=False)
    return named(_compute_node)
