"""Cluster resources that a stage's actors reserve."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field, model_validator

from rlhf_core.config.base import Config
from rlhf_core.config.numbers import CPUs, Minutes, Processes, Threads, WorkerGPUs
from rlhf_core.config.texts import GroupName


@dataclass(frozen=True, slots=True)
class Reservation:
    """Total resources reserved by a stage's actors."""

    cpus: float = 0.0
    gpus: float = 0.0
    parts: frozenset[tuple[float, float]] = frozenset()  # CPUs and GPUs of the actors, each of which is on one node

    @property
    def devices(self) -> float:
        """GPUs, or CPUs if there are none: the unit of device seconds."""
        return self.gpus or self.cpus

    def __add__(self, other: Reservation) -> Reservation:
        return Reservation(self.cpus + other.cpus, self.gpus + other.gpus, self.parts | other.parts)

    def __or__(self, other: Reservation) -> Reservation:
        """Return the maximum of both, for one that is released before the other is made."""
        return Reservation(max(self.cpus, other.cpus), max(self.gpus, other.gpus), self.parts | other.parts)


def of_each(count: int, cpus: float, gpus: float) -> Reservation:
    """Return the reservation of `count` actors with the same resources each."""
    return Reservation(count * cpus, count * gpus, frozenset({(cpus, gpus)}))


class Placement(Config):
    """Resources that Ray reserves for one group of workers. `threads` 0: as many as the reserved CPUs."""

    workers: Processes = Field(default=1, description="number of worker processes")
    cpus_per_worker: CPUs = Field(default=1.0, description="CPUs that Ray reserves")
    gpus_per_worker: WorkerGPUs = Field(default=0.0, description="GPUs that Ray reserves")
    threads: Threads = Field(default=0, description="torch threads of each worker; 0: as many as the reserved CPUs")
    timeout_minutes: Minutes = Field(
        default=30.0,
        description="minutes that a worker waits for the others in a collective operation, before it fails",
    )

    @model_validator(mode="after")
    def _gpus_are_their_own(self) -> Placement:
        if self.workers > 1 and 0 < self.gpus_per_worker < 1:
            raise ValueError(
                f"gpus_per_worker={self.gpus_per_worker:g}, but {self.workers} workers that exchange gradients cannot "
                "share a GPU: set 1 (rl.hybrid shares a GPU with an engine by itself)"
            )
        return self

    @property
    def num_threads(self) -> int:
        """Threads of each worker."""
        return self.threads or max(1, math.ceil(self.cpus_per_worker))

    def reserves(self) -> Reservation:
        return of_each(self.workers, self.cpus_per_worker, self.gpus_per_worker)


class ModelPlacement(Placement):
    """Resources that Ray reserves for one model of an RL run, apart from the policy's workers."""

    group: GroupName | None = Field(
        default=None,
        description="name of a group of models that share these workers, each with the same placement; none: workers "
        "of its own",
    )


def require_others(offload: bool, placement: ModelPlacement | None, model: str) -> None:
    """Raise ValueError if a model is offloaded, and no other is on its workers."""
    if offload and placement is not None and placement.group is None:
        raise ValueError(
            f"offload makes room for other models, but with a placement without `group` the {model} is alone on its "
            "devices; remove one of them"
        )
