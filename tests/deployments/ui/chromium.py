"""Pages in the `chromium` of the system, as `apt-get install chromium` brings it, on a desktop and on a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, sync_playwright

_CHROMIUM = shutil.which("chromium")

DEVICES = ["desktop", "phone in the dark"]
NEEDS_CHROMIUM = pytest.mark.skipif(
    _CHROMIUM is None, reason="this machine has no `chromium`: apt-get install chromium"
)


@contextmanager
def new_page(device: str) -> Iterator[Page]:
    """Yield an empty page. At the end it must fit the screen, and the browser have complained about nothing."""
    is_phone = device != "desktop"
    size = {"width": 390, "height": 844} if is_phone else {"width": 1280, "height": 900}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport=size, color_scheme="dark" if is_phone else "light")  # type: ignore[arg-type]
        complaints: list[str] = []
        page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
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
