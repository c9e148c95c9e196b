"""The progress artifact of a flow run in Prefect: a line for each stage, those that failed first."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from rlhf_core.errors import one_line, shortened

_KEY = "progress"
_SECONDS = 1.0  # between two updates of the artifact
_LONGEST = 1000  # characters of a line: the reason of a failure
_LINE = re.compile(r"\*\*(?P<node>.+?)\*\* (?P<percent>[0-9.]+) % · (?P<text>.*)")


@dataclass(frozen=True, slots=True)
class StageProgress:
    percent: float
    text: str
    failed: bool = False


class RunProgress:
    """Progress of the stages of a flow run, which its tasks report from their threads."""

    def __init__(self, nodes: Iterable[str]):
        """Create the artifact. Must be called in the flow, whose page shows it then."""
        self._stages: dict[str, StageProgress | None] = dict.fromkeys(nodes)
        self._lock = threading.Lock()
        self._shown_at, self._changed = time.monotonic(), False
        artifact_id = create_progress_artifact(0.0, key=_KEY, description="no stage has begun")
        assert isinstance(artifact_id, UUID), "synchronous, since no event loop runs in the flow's thread"
        self._artifact = artifact_id

    def report(self, node: str, progress: StageProgress) -> None:
        """Set the progress of a stage. It is shown now, or with `refresh`."""
        with self._lock:
            self._stages[node] = progress
            self._changed = True
        self.refresh()

    def refresh(self, *, now: bool = False) -> None:
        """Show what has been reported, at most once a second unless `now`."""
        with self._lock:
            if not self._changed or not (now or time.monotonic() - self._shown_at >= _SECONDS):
                return
            self._shown_at, self._changed = time.monotonic(), False
            percent = sum(stage.percent for stage in self._stages.values() if stage) / len(self._stages)
            update_progress_artifact(self._artifact, percent, description=self._description())

    def end(self, node: str, text: str, *, failed: bool = False) -> None:
        """Set and show how a stage has ended. One that failed keeps its share."""
        with self._lock:
            stage = self._stages[node]
            percent = 100.0 if not failed else 0.0 if stage is None else stage.percent
            self._stages[node] = StageProgress(percent, text, failed)
            self._changed = True
        self.refresh(now=True)

    def _description(self) -> str:
        begun = [(name, stage) for name, stage in self._stages.items() if stage is not None]
        begun.sort(key=lambda item: not item[1].failed)
        return "\n\n".join(
            f"**{name}** {stage.percent:.4g} % · {shortened(one_line(stage.text), _LONGEST)}" for name, stage in begun
        )


def stages_of(description: str) -> dict[str, StageProgress]:
    """Return the progress of each stage that has begun, from the description of the artifact."""
    lines = (_LINE.fullmatch(line) for line in description.split("\n\n"))
    return {line["node"]: StageProgress(float(line["percent"]), line["text"]) for line in lines if line}
