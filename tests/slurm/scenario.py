"""A recipe on two nodes of Slurm: the script reaches its time limit, is queued again and resumes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deployments.cluster.sizes import ClusterSize
from deployments.cluster.slurm import slurm_script
from deployments.stack.environment import RECIPES
from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.prepare import check
from rlhf_core.testing.stage import without_times
from tests.cluster import service_environment
from tests.services import S3Server, store_of_runs
from tests.slurm.daemons import ADDRESSES, Slurm

SECONDS = 2400.0
STEPS = int(os.environ.get("SLURM_STEPS", "2000"))  # so many that the time limit comes in the middle
CPUS = 4
NOTICE = 300
# One rank on each node. No checkpoint is due before the end.
OVERRIDES = [
    "data.text.source.options.words=500", "data.text.source.options.others=50", "pretrain.epochs=100",
    f"pretrain.max_steps={STEPS}", "pretrain.batch_size=4", "pretrain.log_every=5", "pretrain.placement.workers=2",
    "pretrain.placement.cpus_per_worker=3", "pretrain.placement.threads=1", "pretrain.checkpoint.every_minutes=600",
    "sft=null", "reward_model=null", "rl=null", "evaluation=null",
]  # fmt: skip


class Run:
    """The recipe `tiny` up to its pre-training, as a job of Slurm with a store of its own."""

    def __init__(self, slurm: Slurm, name: str, server: S3Server) -> None:
        self._slurm, self._name = slurm, name
        self._variables = service_environment(**server.environment())
        self.store = open_store(f"s3://runs/{name}")
        node = check(str(RECIPES / "tiny.yaml"), OVERRIDES, store=self.store.url).node("pretrain")
        self.ref: ArtifactRef = node.ref
        self.job_id = ""

    def submit(self) -> None:
        size = ClusterSize(nodes=2, cpus=CPUS, gpus=0, memory_gib=4)
        script = slurm_script(
            self._name, ["tiny", *OVERRIDES], size, store=self.store.url, time="02:00:00", notice=NOTICE
        )
        self.job_id = self._slurm.submit(script, _passed(self._variables))

    @property
    def log(self) -> str:
        return self._slurm.output(f"alignment-{self._name}-{self.job_id}.log")

    def wait_until(self, what: str, reached: Any) -> None:
        print(f"  {time.strftime('%X')} {self._name}: waiting until {what}", flush=True)
        deadline = time.monotonic() + SECONDS
        while not reached():
            state = self._slurm.job(self.job_id).get("JobState", "unknown")
            if state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL") or time.monotonic() > deadline:
                raise RuntimeError(f"{self._name} is {state} before {what}:\n{self.log[-6000:]}")
            time.sleep(2)

    def trains(self) -> bool:
        return re.search(rf"pretrain .*step [1-9]\d* of {STEPS}", self.log) is not None

    def ended(self) -> bool:
        return self._slurm.job(self.job_id)["JobState"] == "COMPLETED"

    def result(self, cache: Path) -> tuple[str, list[dict[str, Any]]]:
        repository = ArtifactRepository(self.store)
        manifest = repository.manifest(self.ref)
        assert manifest is not None, self.log[-3000:]
        (weights,) = (file.sha256 for file in manifest.files if file.path.endswith("model.safetensors"))
        lines = (repository.fetch(manifest.ref, cache) / "metrics.jsonl").read_text().splitlines()
        return weights, [without_times(json.loads(line)) for line in lines]


def _passed(variables: Mapping[str, str]) -> dict[str, str]:
    kept = ("AWS_", "PYTHON", "HF_", "OMP_", "TOKENIZERS_", "DO_NOT_TRACK")
    return {name: value for name, value in variables.items() if name.startswith(kept)}


def play(folder: Path) -> dict[str, Any]:
    began = time.monotonic()
    with ExitStack() as stack:
        slurm = Slurm(folder, CPUS)
        stack.callback(slurm.stop)
        slurm.start()
        server = stack.enter_context(store_of_runs(ADDRESSES["node1"]))
        stopped, whole = (Run(slurm, name, server) for name in ("stopped", "whole"))
        stopped.submit()
        stopped.wait_until("it trains", stopped.trains)
        checkpoints = Checkpoints(stopped.store, stopped.ref)
        # Of NOTICE seconds 180 to 240 are left, so that Slurm sends the signal; it looks every 30 s.
        minutes = int(time.monotonic() - began) // 60 + 4
        slurm.ask("scontrol", "update", f"JobId={stopped.job_id}", f"TimeLimit={minutes}")
        stopped.wait_until("it is queued again", lambda: int(slurm.job(stopped.job_id)["Restarts"]) > 0)
        step = checkpoints.newest_step()
        slurm.ask("scontrol", "update", f"JobId={stopped.job_id}", "TimeLimit=120")
        stopped.wait_until("it has ended", stopped.ended)
        whole.submit()
        whole.wait_until("it has ended", whole.ended)
        results = [run.result(folder / "cache") for run in (stopped, whole)]
        return {
            "checkpoint": step,
            "weights": [weights for weights, _ in results],
            "metrics": [metrics for _, metrics in results],
            "restarts": [int(slurm.job(run.job_id)["Restarts"]) for run in (stopped, whole)],
            "seconds": time.monotonic() - began,
        }


if __name__ == "__main__":
    (Path("/tmp") / "slurm").mkdir()
    with os.fdopen(int(sys.argv[1]), "w") as answer:
        json.dump(play(Path("/tmp/slurm")), answer)
