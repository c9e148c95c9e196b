"""Settings of trackers, besides metrics.jsonl. `TRACKERS` lists those that are chosen by `type`; plugins add more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from rlhf_core.config.base import Config
from rlhf_core.config.plugins import Table
from rlhf_core.config.texts import JudgeName, Label, Project, Tag
from rlhf_core.config.typed import TypedConfig


class TrackerConfig(TypedConfig):
    """Every tracker that is chosen by its `type`."""

    family: ClassVar[str] = "tracker"

    @classmethod
    def table(cls) -> Table[Any]:
        return TRACKERS


@dataclass(frozen=True, slots=True)
class TrackerEntry:
    config: type[TrackerConfig]
    # "package.module:Class" of a tracking.sink.Sink, made by `of(config, folder, about)`; imported where metrics are
    # logged
    implementation: str


class MLflowConfig(TrackerConfig):
    """The server in the variable MLFLOW_TRACKING_URI, an http(s) URL."""

    type: Literal["mlflow"]
    experiment: Label = Field(default="alignment", description="experiment of the runs; made if it is missing")


class TrackioConfig(TrackerConfig):
    """The server in the variable TRACKIO_SERVER_URL, an http(s) URL."""

    type: Literal["trackio"]
    project: Project = Field(default="alignment", description="project of the runs")


class SwanLabConfig(TrackerConfig):
    """SwanLab's cloud or your server, with the package `swanlab` on the nodes; offline without a key."""

    type: Literal["swanlab"]
    project: Project = Field(default="alignment", description="project of the runs")
    workspace: Project | None = Field(default=None, description="team or user; null: the account's default")


class PrometheusConfig(TrackerConfig):
    """Gauges at the exporter of the job's Ray node, which Grafana on a Ray cluster reads."""

    type: Literal["prometheus"]


TRACKERS: Table[TrackerEntry] = Table(
    "trackers",
    TrackerEntry,
    {
        "mlflow": TrackerEntry(MLflowConfig, "rlhf_core.tracking.mlflow:MLflow"),
        "trackio": TrackerEntry(TrackioConfig, "rlhf_core.tracking.trackio:Trackio"),
        "swanlab": TrackerEntry(SwanLabConfig, "rlhf_core.tracking.swanlab:SwanLab"),
        "prometheus": TrackerEntry(PrometheusConfig, "rlhf_core.actors.ray_metrics:RayMetrics"),
    },
)


class TrackingConfig(Config):
    wandb: bool = Field(default=True, description="Weights & Biases; offline without a key")
    wandb_project: Project = Field(default="alignment", description="project of the runs")
    wandb_entity: Project | None = Field(default=None, description="team or user; null: the account's default")
    wandb_group: Label | None = Field(default=None, description="group of the runs; null: the id of the recipe's run")
    wandb_name: Label | None = Field(
        default=None, description="name of the runs, followed by `/` and the node; null: the node"
    )
    wandb_tags: tuple[Tag, ...] = Field(default=(), description="tags besides the start of the stage's key")
    wandb_samples: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="most samples of an evaluation in a table; none by default, since prompts and completions are sent",
    )
    wandb_system_metrics: bool = Field(
        default=False,
        description="Weights & Biases' own metrics of the job's machine: CPU, memory, disk, network, GPUs, in the run",
    )
    tensorboard: bool = Field(default=True, description="TensorBoard event files, kept in the artifact")
    others: dict[JudgeName, TrackerConfig] = Field(
        default={}, description="name -> further tracker; files that it writes are kept in the artifact"
    )
