"""The viewer as a user starts it: `sonde view` in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import TimeoutError as NotInTime
from tests.waiting import PATIENCE_S, ask, started


@dataclass(frozen=True)
class Viewer:
    """A server that runs: the address to open, the same without its token, and its process."""

    url: str
    process: subprocess.Popen[str]

    @property
    def base(self) -> str:
        return self.url.partition("?")[0]

    @property
    def token(self) -> str:
        return self.url.partition("token=")[2]


@contextmanager
def serving(*roots: Path | str) -> Iterator[Viewer]:
    """Start the viewer on a free port and stop it afterwards."""
    command = [sys.executable, "-m", "sonde", "view", *map(str, roots), "--port", "0", "--no-browser"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with started(command, stdin=None, stderr=subprocess.STDOUT, env=environment) as process:
        lines = [ask(process)]
        while not (found := re.search(r"http://\S+", lines[-1])):
            lines.append(ask(process))
        # Read on, else a server that has much to complain of waits for a reader for ever.
        reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            yield Viewer(found[0], process)
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            reader.join(PATIENCE_S)


class Window:
    """A window on the viewer, and what went wrong in it."""

    def __init__(self, browser: Any, viewer: Viewer, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1366, "height": 768}, **options)
        self.page, self.errors = self.context.new_page(), list[str]()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._hear)
        self.page.goto(viewer.url)
        self.page.wait_for_selector("main[data-ready]")

    def _hear(self, told: Any) -> None:
        if told.type in ("error", "warning"):
            self.errors.append(told.text)


def go(page: Any, hash_: str) -> None:
    """Follow a link inside the viewer, and wait until its page stands."""
    page.evaluate(
        "hash => { document.getElementById('main').removeAttribute('data-ready');"
        " if (location.hash === hash) dispatchEvent(new HashChangeEvent('hashchange')); else location.hash = hash; }",
        hash_,
    )
    page.wait_for_selector("main[data-ready]")


BUSY = (
    "[...document.querySelectorAll('.figure[aria-busy=true]')].filter(each => !each.hidden &&"
    " each.getBoundingClientRect().top <= innerHeight + 300)"
)
"""Figures in view that are not drawn yet."""


def settle(page: Any) -> None:
    """Wait until every figure in view is drawn or has said why not."""
    drawn = f"() => {BUSY}.length === 0"  # as a function: the page's policy lets nobody evaluate a text
    try:
        page.wait_for_function(drawn, timeout=60_000)
    except NotInTime:
        page.bring_to_front()  # a page behind another may get no frames, and draws nothing then
        try:
            page.wait_for_function(drawn)
        except NotInTime as error:
            left = page.evaluate(f"() => {BUSY}.map(each => [each.innerText, each.getBoundingClientRect().toJSON()])")
            raise AssertionError(f"not drawn: {left}") from error


def links(page: Any) -> list[str]:
    """Return the pages that the bar leads to."""
    found: list[str] = page.evaluate("[...document.querySelectorAll('#bar nav a')].map(each => each.hash)")
    return found


def walk(page: Any) -> Iterator[str]:
    """Open every page that the bar leads to, from top to bottom; yield the hash of each."""
    for hash_ in links(page):
        go(page, hash_)
        settle(page)
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        settle(page)
        yield hash_
