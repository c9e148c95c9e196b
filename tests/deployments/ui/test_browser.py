"""The pages in a real Chromium: from a curve to a token, from a bar to its completions, two runs side by side.

Needs the `chromium` of the system, as `apt-get install chromium` brings it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

from deployments.ui.demo import write_demo
from deployments.ui.demo_run import RUN_ID, write_demo_run
from deployments.ui.pages import Pages
from deployments.ui.reading import StoreReader
from deployments.ui.server import application
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.system.network import listening
from tests.deployments.ui.served import served

CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.endurance("two-nodes"),
    pytest.mark.skipif(CHROMIUM is None, reason="this machine has no `chromium`: apt-get install chromium"),
]

TOKEN = "secret"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    repository = ArtifactRepository(LocalStore(tmp_path / "store"))
    write_demo(repository, runs=2, steps=10)
    write_demo_run(repository)
    pages = Pages(StoreReader(repository, tmp_path / "cache"))
    with listening("127.0.0.1", 0) as listener, served(application(pages, TOKEN, frozenset({"127.0.0.1"})), listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/?token={TOKEN}"


@pytest.fixture(params=["desktop", "phone in the dark"])
def page(url: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The list of runs. Whatever the browser complains about fails the test."""
    is_phone = request.param != "desktop"
    size = {"width": 390, "height": 844} if is_phone else {"width": 1280, "height": 900}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport=size, color_scheme="dark" if is_phone else "light")  # type: ignore[arg-type]
        complaints: list[str] = []
        page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        yield page
        assert complaints == []
        require_fits(page)
        browser.close()


def require_fits(page: Page) -> None:
    assert page.viewport_size is not None
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def click_chart(page: Page, title: str, across: float) -> None:
    box = page.locator(f'.charts > div[data-title="{title}"]').bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * across, box["y"] + box["height"] * 0.6)


def test_from_a_curve_to_a_token(page: Page) -> None:
    page.get_by_role("link", name="sums").first.click()
    page.get_by_role("link", name="rl", exact=True).first.click()
    page.locator(".charts canvas").first.wait_for()
    click_chart(page, "reward and KL", 0.9)
    page.wait_for_url("**/rl/steps/10")
    page.locator(".charts canvas").first.wait_for()
    click_chart(page, "reward", 0.3)  # the bar of the low rewards
    page.wait_for_url("**?histogram=reward&low=0&high=0.5")
    page.locator(".chip.low").first.click()
    page.locator(".tokens span[tabindex]").first.hover()
    shown = page.get_by_role("status").inner_text()
    assert all(name in shown for name in ("advantage -", "engine -", "trainer -", "ratio "))
    page.get_by_label("colour by").select_option("ratio")
    coloured = page.locator(".tokens span[tabindex]").first.evaluate("span => span.style.backgroundColor")
    assert coloured.startswith("rgba(")


def test_from_the_lineage_to_the_rows_of_a_dataset(page: Page) -> None:
    require_fits(page)  # the list of runs
    page.get_by_role("link", name="assistant").click()
    require_fits(page)
    bar = page.get_by_role("img", name="rl: killed, 09:04:24 to 09:05:00 (36 s)")
    place, track = bar.bounding_box(), bar.locator("..").bounding_box()
    assert place is not None
    assert track is not None
    assert (place["x"] - track["x"]) / track["width"] == pytest.approx(264 / 488, abs=0.01)
    page.locator("svg.lineage").get_by_role(
        "link", name="prompts, computed; made from test (exclude.test)", exact=True
    ).click()
    page.wait_for_url(f"**/runs/{RUN_ID}/prompts")
    require_fits(page)
    page.get_by_role("link", name="after").first.click()
    page.wait_for_url("**?from=20#rows")
    assert page.get_by_role("link", name="Row 21").count() == 1
    page.goto(page.url.partition("prompts")[0] + "pairs")
    sides = [page.get_by_role("heading", name=side).first.bounding_box() for side in ("chosen", "rejected")]
    assert sides[0] is not None
    assert sides[1] is not None
    assert (sides[0]["y"] == sides[1]["y"]) == (page.viewport_size != {"width": 390, "height": 844})


def test_two_runs_side_by_side(page: Page) -> None:
    for box in page.get_by_role("checkbox", name="compare sums").all():
        box.check()
    page.get_by_role("button", name="Compare").click()
    page.locator(".charts").scroll_into_view_if_needed()  # they are drawn when they come into sight
    page.locator(".charts canvas").first.wait_for()
    assert page.get_by_text("rl.grpo.optimizer.learning_rate").count() == 1
    assert page.get_by_text("0.002").count() == 1


def test_a_candidate_is_approved_and_the_champion_rolled_back(page: Page) -> None:
    page.get_by_role("link", name="Models").click()
    page.get_by_role("link", name="sums").click()
    page.get_by_label("your name").fill("ann")
    page.get_by_label("reason", exact=True).fill("shorter")
    page.get_by_role("button", name="Approve").click()
    page.get_by_text("approved by ann: shorter").wait_for()
    page.get_by_label("reason of the rollback").fill("it is rude")
    page.get_by_role("button", name="Roll back").click()
    page.get_by_role("cell", name="it is rude").first.wait_for()
    assert page.get_by_role("alert").count() == 0
