"""Reports that a test's job makes of artifacts in a store."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.stages.outputs import ReportConfig
from rlhf_core.stages.key import computing_libraries, stage_key
from rlhf_core.stages.runner import run_job
from rlhf_core.stages.table import STAGES


def reported(repository: ArtifactRepository, nodes: Mapping[str, ArtifactRef], title: str) -> Manifest:
    """The report of these artifacts, by the names of their nodes, as its job makes it."""
    stage, config, libraries = STAGES["report"], ReportConfig(title=title), computing_libraries()
    inputs = {f"node.{name}": ref for name, ref in nodes.items()}
    key = stage_key(stage, config, inputs=inputs, user_files={}, seed=None, libraries=libraries)
    spec = StageSpec(
        name="report", stage=stage.name, stage_version=stage.version, key=key, config=config.model_dump(mode="json"),
        inputs=inputs, user_files={}, seed=None, libraries=libraries, tracking={"wandb": False, "tensorboard": False},
    )  # fmt: skip
    repository.write_spec(spec)
    return run_job(repository.store.url, spec.ref)
