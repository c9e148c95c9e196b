"""A run's HTML report, copied from the store to where a browser can open it."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StoreError
from rlhf_core.pipeline.record import report_path

OUTPUTS = Path("outputs")


def copy_report(store: Store, run_id: str) -> Path:
    """The path of the copy. Raises StoreError if the store has no report of the run."""
    report = store.get(report_path(run_id))
    if report is None:
        raise StoreError(f"{store.url} has no report of the run {run_id}: only a run that has completed has one")
    path = OUTPUTS / run_id / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(report)
    return path
