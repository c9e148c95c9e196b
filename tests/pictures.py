"""Write the pictures of the documentation: pages of the newest run of `tiny` on the local stack, and its Prefect graph.

Needs `alignment up`, a finished `alignment run tiny`, and the system's `chromium`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import FloatRect, Page, ViewportSize, sync_playwright

from deployments.stack.environment import load_stack_environment
from deployments.ui.reading import StoreReader
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.pipeline.run_view import Run
from tests.deployments.ui.chromium import new_page
from tests.deployments.ui.served import browsing

_IMAGES = Path(__file__).parents[1] / "docs" / "images"
_MILLISECONDS = 9000  # for Prefect's canvas and BokehJS
_SIZE: ViewportSize = {"width": 1280, "height": 900}
_MENU, _LOGS = 256, 500  # pixels of Prefect's page: what is left of the graph, and its lower end


def main() -> int:
    load_stack_environment()
    store = open_store(store_url())
    with tempfile.TemporaryDirectory() as cache:
        runs = StoreReader(ArtifactRepository(store), Path(cache) / "runs").runs()
        run = next((each for each in runs if (each.name, each.outcome) == ("tiny", "succeeded")), None)
        if run is None:
            print(f"{store.url} has no finished run of `tiny`: alignment run tiny", file=sys.stderr)
            return 1
        with sync_playwright() as playwright:  # not `new_page`, which has no patience with complaints of Prefect's page
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            _graph(browser.new_page(viewport=_SIZE), run)
            browser.close()
        with new_page("desktop") as page:
            _pages(page, run, store, Path(cache) / "pages")
    return 0


def _graph(page: Page, run: Run) -> None:
    login = os.environ.get("PREFECT_API_AUTH_STRING", "")
    page.add_init_script(f"localStorage.setItem('prefect-password', btoa({login!r}))")  # where Prefect's page keeps it
    page.goto(f"{os.environ['PREFECT_API_URL'].removesuffix('/api')}/runs/flow-run/{run.run_id}")
    page.wait_for_timeout(_MILLISECONDS)
    graph: FloatRect = {"x": _MENU, "y": 0, "width": _SIZE["width"] - _MENU, "height": _LOGS}
    page.screenshot(path=_IMAGES / "prefect-graph.png", clip=graph)


def _pages(page: Page, run: Run, store: Store, cache: Path) -> None:
    with browsing(store, cache) as client:
        cookies = [
            {"name": name, "value": value, "url": str(client.base_url)} for name, value in client.cookies.items()
        ]
        page.context.add_cookies(cookies)  # type: ignore[arg-type]  # dicts of this form
        for path, name in ((f"runs/{run.run_id}", "run-page"), (f"runs/{run.run_id}/rl", "ui-stage")):
            page.goto(f"{client.base_url.join(path)}")
            page.wait_for_timeout(_MILLISECONDS)
            page.screenshot(path=_IMAGES / f"{name}.png")


if __name__ == "__main__":
    sys.exit(main())
