"""A real browser: the Chromium of the system, without a window, driven by Playwright."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING, Any, Iterator, List

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """All tests of this folder need the browser. Other legs do not have Playwright: there they are skipped, with the
    name of the leg that has it."""
    for item in items:
        if item.path.parent.name == "browser":
            for marker in (pytest.mark.browser, pytest.mark.long, pytest.mark.slow):
                item.add_marker(marker)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: run `make test-browser`")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium on PATH: apt-get install chromium")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has none
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


class Observed:
    """A tab of the browser, with all that it has complained of and asked for.

    Attributes:
        page: the tab.
        complaints: errors, warnings and violations of the page's policy.
        requests: URLs of other schemes than ``file`` and ``data``.
    """

    def __init__(self, page: "Page") -> None:
        self.page = page
        self.complaints: List[str] = []
        self.requests: List[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._on_request(request.url))

    def _on_request(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.requests.append(url)

    def wait_for(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true. The page's policy forbids what Playwright waits by."""
        deadline = time.monotonic() + 60
        while not self.page.evaluate(f"() => Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            self.page.wait_for_timeout(50)

    def show(self, figure: str) -> None:
        """Scroll to a figure, and wait until it is drawn: those outside of the window need not be."""
        self.page.locator(f'[data-figure="{figure}"]').scroll_into_view_if_needed()
        self.wait_for(f"(chart => chart.plot && !chart.isStale)(runPage.charts.get({json.dumps(figure)}))")

    def values(self, figure: str) -> List[List[float]]:
        """The values that a figure draws, a list for each run, without gaps."""
        self.show(figure)
        drawn = self.page.evaluate(
            "key => runPage.charts.get(key).plot.data.slice(1)"
            ".map(values => Array.from(values).filter(value => value !== null && value !== undefined))",
            figure,
        )
        return [list(values) for values in drawn]

    def has_ink(self, figure: str) -> bool:
        """Whether the canvas of a figure has pixels in color, which only curves have."""
        self.show(figure)
        return bool(
            self.page.evaluate(
                "key => { const canvas = runPage.charts.get(key).plot.ctx.canvas;"
                "const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
                "for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200 && Math.max(data[i], data[i + 1],"
                "data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 60) return true; return false; }",
                figure,
            )
        )


@pytest.fixture
def tab(chromium: Any) -> Iterator[Observed]:
    """A new tab, of which no complaint may remain unseen."""
    context = chromium.new_context(viewport={"width": 1300, "height": 900})
    observed = Observed(context.new_page())
    yield observed
    context.close()
    assert observed.complaints == []
