"""The pages in a real Chromium: from a curve to a token, from a bar to its completions, two runs side by side.

Needs the `chromium` of the system, as `apt-get install chromium` brings it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from deployments.ui.demo import write_demo
from deployments.ui.demo_run import RUN_ID, write_demo_run
from deployments.ui.pages import Pages
from deployments.ui.reading import StoreReader
from deployments.ui.server import application
from rlhf_core.artifacts.aliases import read_alias
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.system.network import listening
from tests.deployments.ui.chromium import DEVICES, NEEDS_CHROMIUM, click_chart, new_page, require_fits
from tests.deployments.ui.served import served

pytestmark = [
    pytest.mark.endurance("two-nodes"),
    NEEDS_CHROMIUM,
]

TOKEN = "secret"
# The words of a page's tables that are on several lines, and how many boxes have more than fits.
BROKEN_WORDS = """() => {
  const broken = [], range = document.createRange();
  for (const cell of document.querySelectorAll("th, td")) {
    const isShort = (text) => text.parentElement.closest("pre") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT;
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT, isShort);
    while (texts.nextNode()) for (const { 0: word, index } of texts.currentNode.data.matchAll(/[\\w.]+/g)) {
      range.setStart(texts.currentNode, index);
      range.setEnd(texts.currentNode, index + word.length);
      if (range.getClientRects().length > 1) broken.push(word);
    }
  }
  const boxes = [...document.querySelectorAll(".scroll")];
  return [broken, boxes.filter((each) => each.scrollWidth > each.clientWidth).length];
}"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    repository = ArtifactRepository(LocalStore(tmp_path / "store"))
    write_demo(repository, runs=2, steps=10)
    write_demo_run(repository)
    pages = Pages(StoreReader(repository, tmp_path / "cache"))
    with listening("127.0.0.1", 0) as listener, served(application(pages, TOKEN, frozenset({"127.0.0.1"})), listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/?token={TOKEN}"


@pytest.fixture(params=DEVICES)
def page(url: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The list of runs."""
    with new_page(request.param) as page:
        page.goto(url)
        yield page


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


def test_a_word_in_a_table_stays_whole_and_what_is_wider_than_the_screen_scrolls(page: Page) -> None:
    base, is_phone = page.url.rstrip("/"), page.viewport_size == {"width": 390, "height": 844}
    paths = [page.get_by_role("link", name=name).first.get_attribute("href") for name in ("assistant", "sums")]
    for path in ["", *paths, "/models", "/models/sums", "/loops/nightly"]:
        page.goto(f"{base}{path}")
        require_fits(page)
        broken, scrolled = page.evaluate(BROKEN_WORDS)
        assert broken == [], path
        assert scrolled >= is_phone, path
    page.goto(f"{base}{paths[0]}")
    assert page.locator(".scroll > svg.lineage").count() == 1


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
    page.locator("summary", has_text="Roll back to").click()
    page.get_by_role("checkbox", name="again, in place of").check()
    page.get_by_label("reason of the rollback").fill("it is rude")
    page.get_by_role("button", name="Roll back").click()
    page.get_by_role("cell", name="it is rude").first.wait_for()
    assert page.get_by_role("alert").count() == 0


def test_from_a_loop_to_a_promoted_model_and_a_bar_of_ratios(page: Page, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    candidate = read_alias(store, "sums", "candidate")
    assert candidate is not None
    page.get_by_role("link", name="Loops").click()
    page.get_by_role("link", name="nightly").click()
    page.locator(".charts canvas").first.wait_for()
    require_fits(page)
    page.get_by_role("link", name=str(candidate.manifest)).click()  # the model of the last round
    page.get_by_role("link", name="step 10").click()
    page.locator('.charts > div[data-title="ratio"] canvas').first.wait_for()
    click_chart(page, "ratio", 0.75)
    page.wait_for_url("**?histogram=ratio&*")
    assert page.locator("ul li a").count() > 0
    page.get_by_role("link", name="sums", exact=True).click()
    page.get_by_text("It is sums/candidate since").wait_for()
    page.get_by_role("link", name="it waits for a person").click()
    assert page.locator("svg.interval .range").count() == 1
    page.get_by_label("your name").fill("ann")
    page.get_by_role("button", name="Approve").click()
    page.get_by_text("approved by ann").first.wait_for()
    page.get_by_role("link", name="Data").click()
    page.get_by_role("link", name="prompts", exact=True).click()
    page.wait_for_url(f"**/runs/{RUN_ID}/prompts")


def test_a_candidate_without_a_gate_is_promoted(page: Page, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    champion = read_alias(store, "sums", "champion")
    assert champion is not None
    move_alias(store, "free", "candidate", champion.manifest, by="demo", reason="by hand")
    page.get_by_role("link", name="Models").click()
    page.get_by_role("link", name="free").click()
    page.get_by_label("your name").fill("ann")
    page.get_by_label("reason", exact=True).fill("it is shorter")
    page.get_by_role("button", name="Promote to champion").click()
    page.get_by_text("approved by ann: it is shorter").wait_for()
    assert page.get_by_role("alert").count() == 0
