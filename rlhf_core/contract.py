"""Stages as pure data, independent of torch; `entry` is imported only inside the job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.live import LiveFiles
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
    "calibration": frozenset({Kind.CALIBRATION}),
}

# The hook of a group of ranks or engines: it gets the method of each call, and raises where the call must not be made.
Before = Callable[[Callable[..., Any]], None]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Started(Generic[R]):
    """A call of all ranks of a group that has been started."""

    results: Callable[[], list[R]]  # waits for them, by rank, and raises as a call of the group does
    calls: Mapping[Any, str] = field(default_factory=dict)  # of Ray, with the rank's name; see actors.calls.wait


@dataclass(frozen=True, slots=True)
class Stage:
    """Description of a stage. Its config answers all that depends on the settings: config.stages.base.StageConfig."""

    name: str
    version: int  # raise it if the code changes the results of equal settings
    config: type[StageConfig]
    writes: frozenset[Kind]
    # "package.module:function", called as function(config, inputs, context) -> Output; where it runs in actors, a
    # stages.cluster.Cluster is the fourth argument. Empty: no job.
    entry: str
    runs: Literal["job", "actors"] = "job"  # where it computes: in its job's own process, or in actors
    needs_template: bool = False  # renders conversations, so that its model must have a chat template
    serves: bool = False  # it only serves other stages: left out where one of the recipe could read it and none does
    reads_images: bool = False  # rows of its datasets may have images, but for its config's `text_readers`
    reads_all: bool = False  # every other result is an input of it, `node.NAME`
    # "package.module:function", called as function(config, node, context) before anything runs: `node` is a Draft of
    # pipeline.drafting, `context` a CheckContext of pipeline.checks.context. It yields problems, one sentence each that
    # begins with the wrong setting, and Notes. Empty: only the checks of all stages' settings run.
    checks: str = ""
    # Input name, or a pattern of names -> the files of it that the job fetches; other inputs come whole.
    files: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def job_cpus(self, config: StageConfig) -> float:
        """Return the CPUs that its job reserves for its own process, and those that it starts.

        None where actors compute: several such jobs would each hold the CPUs that the actors of all wait for, for ever.
        """
        return float(config.job_processes) if self.runs == "job" else 0.0

    def job_memory(self, config: StageConfig, inputs: Iterable[Manifest]) -> int:
        """Return the bytes of host memory that its job reserves for its own process."""
        return int(config.input_copies * sum(file.size for manifest in inputs for file in manifest.files))

    def reserves(self, config: StageConfig) -> Reservation:
        """Return the reservation of its job and its actors."""
        cpus = self.job_cpus(config)
        return config.reserves() + (of_each(1, cpus, 0.0) if cpus else Reservation())


@dataclass(frozen=True, slots=True)
class Input:
    """An input artifact, fetched: its manifest and a read-only local folder with its files."""

    manifest: Manifest
    folder: Path


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a stage's function: a folder whose files become the artifact."""

    kind: Kind
    folder: Path
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)


class StageContext(Protocol):
    """Access of a running stage to everything besides its config and inputs.

    Also picklable into Ray actors on any node.
    """

    name: str
    key: str
    workdir: Path  # empty at start; on this node
    libraries: Mapping[str, str]  # that compute, with their versions

    @property
    def seed(self) -> int:
        """The seed of random generators.

        Raises StageError in a stage that, by its settings, draws no random numbers.
        """

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of this stage's key."""

    @property
    def live(self) -> LiveFiles:
        """Files for those who follow this stage. Those below `rollouts/` become part of its result."""

    def fetch(self, ref: ArtifactRef, only: Collection[str] | None = None) -> Input:
        """Return the artifact on this node, or its files in `only`, the bytes verified; cached by content."""

    def put_files(self, folder: Path) -> Mapping[str, str]:
        """Store the files of `folder`, for `get_files` on any node. Returns relative path -> SHA-256."""

    def get_files(self, files: Mapping[str, str], folder: Path) -> None:
        """Write files stored by `put_files` to `folder` on this node, verified."""

    def publish(self, what: str, step: int, output: Output) -> ArtifactRef:
        """Store `output`, the result after `step` steps, as an artifact of its own, `STAGE.WHAT`.

        An existing artifact is kept. Only the driver publishes.
        """

    def user_file(self, path: str) -> Path:
        """Return the user's file that the recipe calls `path`, as of the computation of the key."""

    def user_folder(self, path: str) -> Path:
        """Return the user's folder that the recipe calls `path`, with the files that are part of the key."""

    def pin(self, url: str) -> str | None:
        """Return the identity of the remote source `url` in the key; None if it has none."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl, and to the trackers beside it. Only the driver logs."""

    def logged(self) -> bytes:
        """Return the content of metrics.jsonl so far, which a checkpoint keeps."""

    def restore_log(self, lines: bytes) -> None:
        """Begin with the `lines` of a killed run, as if this one had logged them. Call it before `log`."""

    def progress(self, step: int, total: int, phase: str = "", **metrics: float) -> None:
        """Report the step, the number of steps and the main metrics to the terminal and to Prefect."""
