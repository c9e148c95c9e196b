"""The report of a run as a file in a real Chromium: on a phone, in the dark, without a network, to a single token.

Needs the `chromium` of the system, as `apt-get install chromium` brings it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from deployments.ui.demo import write_demo
from deployments.ui.reading import StoreReader
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.run_view import run_part
from rlhf_core.report.page import with_run
from rlhf_core.tracking.protocol import REPORT_FILE
from tests.deployments.ui.chromium import DEVICES, NEEDS_CHROMIUM, click_chart, new_page, require_fits
from tests.rlhf_core.stages.made_reports import reported

pytestmark = [
    pytest.mark.endurance("two-nodes"),
    NEEDS_CHROMIUM,
    pytest.mark.usefixtures("own_folders"),
]

HOSTILE = "</script><script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The report of the newer of two runs, as `alignment report` copies it."""
    repository = ArtifactRepository(LocalStore(tmp_path / "store"))
    write_demo(repository, runs=2, steps=10)
    reader = StoreReader(repository, tmp_path / "reader")
    run = reader.runs()[0]
    folder = repository.fetch(reported(repository, run.nodes, HOSTILE).ref, tmp_path / "reader")
    nodes = reader.nodes(run)
    part = run_part(repository, run, nodes, reader.inputs(nodes), reader.costs(run).stages, {}, {"rl": 10})
    file = tmp_path / "report.html"
    file.write_text(with_run((folder / REPORT_FILE).read_text(encoding="utf-8"), part), encoding="utf-8")
    return file


@pytest.fixture(params=DEVICES)
def page(file: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The report. Any request but the one for it fails the test."""
    with new_page(request.param) as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url.partition("#")[0]))
        page.goto(file.as_uri())
        require_fits(page)
        yield page
        assert requests == [file.as_uri()]
        assert page.title() == HOSTILE


def test_from_a_curve_to_a_token_offline(page: Page) -> None:
    page.locator("#training").scroll_into_view_if_needed()
    page.locator(".charts canvas").first.wait_for()
    click_chart(page, "reward and KL", 0.85)
    page.wait_for_url("**#stage-rl/steps/10")
    step = page.locator('[id="stage-rl/steps/10"]')
    assert step.get_by_role("heading", name="rl, step 10").is_visible()
    place = step.bounding_box()
    assert place is not None
    assert page.viewport_size is not None
    assert -1 <= place["y"] < page.viewport_size["height"]
    step.locator("details summary").first.click()
    step.locator(".tokens span[tabindex]").first.hover()
    shown = step.get_by_role("status").first.inner_text()
    assert all(name in shown for name in ("advantage ", "engine -", "trainer -", "ratio "))
    step.get_by_label("colour by").first.select_option("engine")
    coloured = step.locator(".tokens span[tabindex]").first.evaluate("span => span.style.backgroundColor")
    assert coloured.startswith("rgba(")


def test_the_parts_of_the_run_page_are_there_and_dark_where_it_is_dark(page: Page) -> None:
    for heading in (
        "Evaluation on held-out prompts", "Samples before and after", "Stages", "Lineage", "Time", "Cost",
        re.compile(r"^Settings that differ from the run \w{8} before it$"),
    ):  # fmt: skip
        assert page.get_by_role("heading", name=heading, exact=True).count() == 1
    assert page.get_by_role("cell", name="rl.grpo.optimizer.learning_rate").count() == 1
    page.locator("svg.lineage").get_by_role("link", name="rl, computed; made from base (model)").click()
    page.wait_for_url("**#stage-rl")
    page.locator(".charts canvas").first.wait_for()
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    is_phone = page.viewport_size == {"width": 390, "height": 844}
    assert back == ("rgb(27, 28, 31)" if is_phone else "rgb(255, 255, 255)")
