"""What a stage is: a pure description. Imports no torch; `entry` is imported only inside the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest, MetricValue
from rlhf_core.config.base import Role
from rlhf_core.config.engines.placement import Reservation, of_each
from rlhf_core.config.stages.base import StageConfig

# The kinds of artifact that serve in each role.
KINDS_OF_ROLE: Mapping[Role, frozenset[Kind]] = {
    "dataset": frozenset({Kind.DATASET}),
    "model": frozenset({Kind.BASE_MODEL, Kind.POLICY}),
    "reward_model": frozenset({Kind.REWARD_MODEL}),
    "adapter": frozenset({Kind.ADAPTER}),
    "logprobs": frozenset({Kind.LOGPROBS}),
    "top_logprobs": frozenset({Kind.TOP_LOGPROBS}),
    "evaluation": frozenset({Kind.EVALUATION}),
}

# The hook of a group of ranks or engines: it gets the method of each call, and raises where the call must not be made.
Before = Callable[[Callable[..., Any]], None]


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage is. What depends on its settings, they answer themselves: config.stage.StageConfig."""

    name: str
    version: int  # raise it when the code changes what the same settings compute
    config: type[StageConfig]
    writes: frozenset[Kind]
    # "package.module:function", called as function(config, inputs, context) -> Output; where it runs in actors, a
    # stages.cluster.Cluster is the fourth argument. Empty: no job.
    entry: str
    runs: Literal["job", "actors"] = "job"  # where it computes: in its job's own process, or in actors
    needs_template: bool = False  # renders conversations, so that its model must have a chat template
    serves: bool = False  # it only serves other stages: left out where one of the recipe could read it and none does
    reads_all: bool = False  # every other result is an input of it, `node.NAME`
    # "package.module:function", called as function(config, node, context) before anything runs: `node` is a Draft of
    # pipeline.drafting, `context` a CheckContext of pipeline.checks.context. It yields problems, one sentence each that
    # begins with the wrong setting, and Notes. Empty: only what all stages answer by their settings is checked.
    checks: str = ""
    # Input name, or a pattern of names -> the files of it that the job fetches; other inputs come whole.
    files: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def job_cpus(self, config: StageConfig) -> float:
        """CPUs that its job reserves for its own process, and those that it starts.

        None where actors compute: several such jobs would each hold what the actors of all wait for, for ever.
        """
        return float(config.job_processes) if self.runs == "job" else 0.0

    def reserves(self, config: StageConfig) -> Reservation:
        """What its job and its actors reserve."""
        cpus = self.job_cpus(config)
        return config.reserves() + (of_each(1, cpus, 0.0) if cpus else Reservation())


def load_function(reference: str) -> Any:
    """The function that "package.module:function" names."""
    module, _, function = reference.partition(":")
    return getattr(import_module(module), function)


@dataclass(frozen=True, slots=True)
class Input:
    """An input artifact, fetched: its manifest and a read-only local folder with its files."""

    manifest: Manifest
    folder: Path


@dataclass(frozen=True, slots=True)
class Output:
    """What a stage's function returns: a folder whose files become the artifact."""

    kind: Kind
    folder: Path
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)


class StageContext(Protocol):
    """What a running stage may ask for besides its config and inputs. Also picklable into Ray actors on any node."""

    name: str
    key: str
    workdir: Path  # empty at start; on this node
    libraries: Mapping[str, str]  # that compute, with their versions

    @property
    def seed(self) -> int:
        """The seed of random numbers. Raises StageError in a stage whose settings say that it draws none."""

    @property
    def checkpoints(self) -> Checkpoints:
        """Those of this stage's key."""

    def fetch(self, ref: ArtifactRef) -> Input:
        """The artifact on this node, its bytes verified; cached by content."""

    def put_files(self, folder: Path) -> Mapping[str, str]:
        """Store the files of `folder`, which `get_files` on any node then gets: relative path -> SHA-256."""

    def get_files(self, files: Mapping[str, str], folder: Path) -> None:
        """Write what `put_files` has stored to `folder` on this node, verified."""

    def publish(self, what: str, step: int, output: Output) -> ArtifactRef:
        """Store `output`, what the stage has made after `step` steps, as an artifact of its own, `STAGE.WHAT`. What is
        there already stays. Only the driver publishes."""

    def user_file(self, path: str) -> Path:
        """The user's file that the recipe calls `path`, as it was when the key was computed."""

    def user_folder(self, path: str) -> Path:
        """The user's folder that the recipe calls `path`: those of its files that are part of the key."""

    def pin(self, url: str) -> str | None:
        """The identity of the remote source `url` that the key was computed with; None if none was."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, and the trackers beside it. Only the driver logs."""

    def logged(self) -> bytes:
        """The content of metrics.jsonl so far, which a checkpoint keeps."""

    def restore_log(self, lines: bytes) -> None:
        """Begin with the `lines` of a run that was killed, as if this one had logged them. Nothing is logged yet."""

    def progress(self, step: int, total: int, phase: str = "", **metrics: float) -> None:
        """Shown in the terminal and in Prefect: which step, of how many, and the main metrics."""
