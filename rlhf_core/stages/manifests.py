"""The manifest of a job's result."""

from __future__ import annotations

import math
import numbers
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rlhf_core
from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest, MetricValue
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.contract import Output
from rlhf_core.errors import StageError


def manifest_of(
    spec: StageSpec,
    output: Output,
    ref: ArtifactRef,
    name: str,
    started: datetime,
    *,
    attempts: Sequence[Attempt] = (),
) -> Manifest:
    """Return the manifest of `output` as the artifact `ref` of the job of `spec`.

    attempts: all until this one, which comes last; none: the time is another artifact's.
    """
    return Manifest(
        kind=output.kind,
        name=name,
        recipe=spec.recipe,
        stage=ref.stage,
        key=ref.key,
        files=(),  # filled in when they are stored
        parents=spec.inputs,
        user_files=spec.user_files,
        pins=spec.pins,
        config=spec.config,
        seed=spec.seed,
        rerun=spec.rerun,
        metrics=_plain(output.metrics),
        code_revision=_code_revision(),
        libraries=spec.libraries,
        device_seconds=sum(attempt.device_seconds for attempt in attempts),
        attempts=tuple(attempts),
        device=attempts[-1].device if attempts else "none",
        started_at=started,
        finished_at=datetime.now(UTC),
    )


def _plain(metrics: Mapping[str, Any]) -> dict[str, MetricValue]:
    """Convert metrics to JSON: numpy's numbers become Python's; non-finite values become None and are logged."""
    plain: dict[str, MetricValue] = {}
    for name, value in metrics.items():
        if isinstance(value, numbers.Integral):
            plain[name] = int(value)
        elif isinstance(value, numbers.Real):
            plain[name] = float(value) if math.isfinite(value) else None
            if plain[name] is None:
                print(f"the metric {name} is {value}: stored as unknown", flush=True)
        elif value is None or isinstance(value, str):
            plain[name] = value
        else:
            raise StageError(f"the metric {name} is a {type(value).__name__}: return numbers or text")
    return plain


def _code_revision() -> str:
    home = Path(rlhf_core.__file__).parents[1]
    if not (home / ".git").exists():  # installed; another project's repository may be around it
        return "unknown"
    command = ["git", "-C", str(home), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return completed.stdout.strip()
