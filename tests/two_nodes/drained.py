"""A rank on the second of two Ray nodes, which is drained as by a pod's hook: the job resumes on the first."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ray.job_submission import JobSubmissionClient

from rlhf_core.artifacts.opening import open_store
from tasks.ray_jobs import RayJobs
from tests.services import store_of_runs
from tests.tasks.stopped_jobs import Run, Watcher, sft_inputs
from tests.two_nodes.scenario import DASHBOARD, HEAD, Nodes


def play(folder: Path) -> dict[str, Any]:
    """Two runs, one of them on a node that is drained, and all that a test compares."""
    with ExitStack() as stack:
        nodes = Nodes(folder)
        stack.callback(nodes.stop)
        nodes.start()
        stack.enter_context(store_of_runs(HEAD))
        jobs, inputs = RayJobs(JobSubmissionClient(DASHBOARD)), sft_inputs(folder / "inputs")
        whole, drained = (Run(open_store(f"s3://runs/{name}"), inputs, folder / name) for name in ("whole", "drained"))
        whole.compute(jobs, Watcher())
        hooks = []
        command = ["env", "RAY_AUTH_MODE=disabled", sys.executable, "-m", "rlhf_core.actors.draining", "60"]
        watcher = Watcher(lambda: hooks.append(nodes.other.inside(*command)))
        drained.compute(jobs, watcher)
        results = [run.result(folder / "cache") for run in (whole, drained)]
        return {
            "said": watcher.said,
            "hooks": [(hook.returncode, hook.stderr) for hook in hooks],
            "weights": [weights for weights, _ in results],
            "metrics": [metrics for _, metrics in results],
        }


if __name__ == "__main__":
    (Path("/tmp") / "rack").mkdir()
    with os.fdopen(int(sys.argv[1]), "w") as answer:
        json.dump(play(Path("/tmp/rack")), answer)
