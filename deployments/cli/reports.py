"""A run's report, copied from the store for a browser, with its content as JSON."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StoreError
from rlhf_core.pipeline.record import known_run, report_json_path, report_path
from rlhf_core.tracking.protocol import REPORT_FILE, REPORT_JSON_FILE

OUTPUTS = Path("outputs")


def copy_report(store: Store, run_id: str) -> list[Path]:
    """Return the paths of the copies: the page, and its content, which runs of earlier releases lack.

    Raises StoreError if the store does not know the run, or has no report of it.
    """
    known_run(store, run_id)
    page = copy_page(store, report_path(run_id), Path(run_id) / REPORT_FILE)
    if page is None:
        raise StoreError(f"{store.url} has no report of the run {run_id}: only a run that has completed has one")
    content = copy_page(store, report_json_path(run_id), Path(run_id) / REPORT_JSON_FILE)
    return [page] if content is None else [page, content]


def copy_page(store: Store, page: str, to: Path) -> Path | None:
    """Return the path of the copy below `OUTPUTS`; None if the store has no such page."""
    content = store.get(page)
    if content is None:
        return None
    path = OUTPUTS / to
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
