"""A run's HTML report, copied from the store for a browser."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.artifacts.store import Store, is_path
from rlhf_core.errors import StoreError
from rlhf_core.pipeline.record import report_path

OUTPUTS = Path("outputs")


def copy_report(store: Store, run_id: str) -> Path:
    """Return the path of the copy. Raises StoreError if the store has no report of the run."""
    if "/" in run_id or not is_path(run_id):
        raise StoreError(f"`{run_id}` is no id of a run: the Prefect UI and `alignment run` show it")
    path = copy_page(store, report_path(run_id), Path(run_id) / "report.html")
    if path is None:
        raise StoreError(f"{store.url} has no report of the run {run_id}: only a run that has completed has one")
    return path


def copy_page(store: Store, page: str, to: Path) -> Path | None:
    """Return the path of the copy below `OUTPUTS`; None if the store has no such page."""
    content = store.get(page)
    if content is None:
        return None
    path = OUTPUTS / to
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
