"""One attempt at an artifact: when and where a job computed it, what that took, and how it ended."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, Field

from rlhf_core.config.base import Config

# killed: its last heartbeat is all that is known of its end; preempted: it ended since a node of it was taken away;
# stuck: a phase of it had hung.
AttemptOutcome = Literal["running", "published", "failed", "stopped", "preempted", "stuck", "killed"]


class Peak(Config):
    """The most memory that a process of an attempt had, those that it had started included."""

    process: str  # job, rank 0, engine 0
    host: int  # bytes, resident
    device: int = 0  # bytes that torch had reserved


class JudgeUse(Config):
    """Replies of a judge's model, with the tokens that its server reported."""

    calls: int = 0
    unreported: int = 0  # calls whose tokens the server did not report
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Attempt(Config):
    id: str  # of the holder of the lease
    run_id: str = ""  # of the run that submitted the job
    host: str
    device: str  # "cpu" or the GPU's name
    gpus: float  # reserved, as are the next two
    cores: float
    memory: int = 0  # bytes of host memory
    started_at: AwareDatetime  # when it had the lease
    seen_at: AwareDatetime  # its end, or its last heartbeat
    waited: float = 0.0  # seconds in between for room on the cluster, without a reservation
    outcome: AttemptOutcome = "running"
    reason: str = ""  # why it has not published
    resumed_after: int | None = None  # the step of the checkpoint that it began with
    step: int | None = None  # the last step reported; None: its stage has none
    checkpoints: tuple[int, ...] = ()  # the steps after which it has written one
    energy: dict[str, float] = Field(
        default_factory=dict
    )  # joules, by device: "gpu", and "cpu" of the whole machine of the job
    judges: dict[str, JudgeUse] = Field(default_factory=dict)  # by model
    peaks: tuple[Peak, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds with a reservation."""
        return max(0.0, (self.seen_at - self.started_at).total_seconds() - self.waited)

    @property
    def device_seconds(self) -> float:
        """Reserved GPUs, or cores if there are none, times seconds."""
        return (self.gpus or self.cores) * self.seconds

    @property
    def core_seconds(self) -> float:
        return self.cores * self.seconds

    @property
    def gib_seconds(self) -> float:
        """The host memory that was reserved, or that its processes had at most if that is more, times seconds."""
        return max(self.memory, sum(peak.host for peak in self.peaks)) / 2**30 * self.seconds
