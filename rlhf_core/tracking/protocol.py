"""Protocol of a stage's job and the readers of its output: two kinds of output line, and the names of files.

A job prints `@progress {...}` lines while it works and, if it fails, `@error {...}` as its last line. The rest of its
output is text for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

METRICS_FILE = "metrics.jsonl"  # in an artifact: one line per logged step
TRACKING_FOLDER = "tracking"  # in an artifact: the files of the other trackers
SAMPLES_FILE = "samples.jsonl"  # in the artifact of an evaluation: one line per prompt
VERDICT_FILE = "verdict.json"  # in the artifact of a gate
REPORT_FILE = "report.html"  # in the artifact of a report
REPORT_JSON_FILE = "report.json"  # in it: the content of the page

PROGRESS_PREFIX = "@progress "
ERROR_PREFIX = "@error "

_Count = Annotated[int, Field(ge=0, le=2**53)]  # larger integers are not exact in JSON
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a stage. `total` is 0 and `seconds_left` None if unknown."""

    __pydantic_config__ = ConfigDict(strict=True)

    step: _Count
    total: _Count
    phase: str
    metrics: Mapping[str, float]
    seconds_left: _Seconds | None

    @property
    def percent(self) -> float:
        return min(100.0, 100.0 * self.step / self.total) if self.total > 0 else 0.0

    def __str__(self) -> str:
        steps = f"step {self.step} of {self.total}" if self.total > 0 else f"{self.step or ''}"
        parts = [steps, self.phase]
        parts += [f"{name} {_short(value)}" for name, value in self.metrics.items()]
        if self.seconds_left is not None:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"{minutes}:{seconds:02d} left")
        return " · ".join(part for part in parts if part)


def _short(value: float) -> str:
    """Format a value in four digits; counts up to a trillion in full."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class JobError:
    """The error of a failed job: the name of the exception's type, and its message."""

    __pydantic_config__ = ConfigDict(strict=True)

    type: str
    message: str

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


_PROGRESS = TypeAdapter(Progress)
_ERROR = TypeAdapter(JobError)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the lines of one of the two files."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def encode(message: Progress | JobError) -> str:
    if isinstance(message, Progress):
        return PROGRESS_PREFIX + json.dumps(asdict(message))
    # The name of a file may hold a lone surrogate, which JSON can write but no strict parser reads.
    text = message.message.encode("utf-8", errors="replace").decode()
    return ERROR_PREFIX + json.dumps({"type": message.type, "message": text})


def parse(line: str) -> Progress | JobError | None:
    """Parse a line; None for any other one.

    User code may print anything, including lines that only begin like a message.
    """
    try:
        if line.startswith(PROGRESS_PREFIX):
            return _PROGRESS.validate_json(line.removeprefix(PROGRESS_PREFIX))
        if line.startswith(ERROR_PREFIX):
            return _ERROR.validate_json(line.removeprefix(ERROR_PREFIX))
    except (ValidationError, UnicodeEncodeError):  # the second: of a lone surrogate, which has no UTF-8
        pass
    return None


def is_of_tracking(path: str) -> bool:
    """Return True for a file of an artifact that trackers wrote, not the stage itself."""
    return path == METRICS_FILE or path.startswith(f"{TRACKING_FOLDER}/")
