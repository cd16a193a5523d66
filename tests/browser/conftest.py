"""A real browser for tests, with the network cut off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="browser tests need the dev extra: pip install 'sonde[dev]'")
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from tests.browser import chromium

PATIENCE_MS = 120_000
"""How long a page may take, which Playwright bounds by 30 s: a busy machine can use that up."""
SLOWNESS = float(os.environ.get("SONDE_SLOW_BROWSER", "0"))
"""How many times slower than usual pages run, with answers that come 50 ms later for each: it shows tests that race."""
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The distribution's Chromium, started once. Skips, saying so, where there is none."""
    path = chromium.find()
    if path is None:
        pytest.skip(chromium.MISSING)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=ARGUMENTS, timeout=PATIENCE_MS)
        new_context = running.new_context

        def patient(**options: Any) -> BrowserContext:
            context = new_context(**options)
            context.offline = options.get("offline", False)  # type: ignore[attr-defined]
            context.set_default_timeout(PATIENCE_MS)
            if SLOWNESS:
                slow_down(context)
            return context

        running.new_context = patient  # type: ignore[method-assign]
        yield running
        running.close()


def slow_down(context: BrowserContext) -> None:
    """Make every page of a context slow, as on a busy machine."""
    new_page = context.new_page

    def slow() -> Page:
        page = new_page()
        devtools = context.new_cdp_session(page)
        devtools.send("Emulation.setCPUThrottlingRate", {"rate": SLOWNESS})
        if not getattr(context, "offline", False):
            rates = {"offline": False, "latency": 50 * SLOWNESS, "downloadThroughput": -1, "uploadThroughput": -1}
            devtools.send("Network.enable")
            devtools.send("Network.emulateNetworkConditions", rates)
        return page

    context.new_page = slow  # type: ignore[method-assign]


class Watched:
    """A page that remembers what went wrong in it, and what it asked the network for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda told: self.errors.append(told.text) if told.type in ("error", "warning") else None)
        page.on("request", self._asked)
        page.on("dialog", self._dialog)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:", "about:")):
            self.requests.append(request.url)

    def _dialog(self, dialog: Any) -> None:
        self.errors.append(f"a script opened a dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, file: Path) -> Page:
        """Open a file from disk and wait until its scripts have run."""
        self.page.goto(file.resolve().as_uri(), wait_until="load")
        return self.page


@pytest.fixture
def offline(browser: Browser) -> Iterator[Watched]:
    """A fresh page without a network."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    yield Watched(context.new_page())
    context.close()
