"""The ten questions of docs/ten-questions.md, answered in the viewer as a newcomer does: by clicks that are counted."""

from __future__ import annotations

import time
from typing import Any

from tests.browser.serving import go


class Reader:
    """Someone with a mouse: each click and each choice in a menu counts as one; time runs from the page that opens."""

    def __init__(self, page: Any) -> None:
        self.page, self.clicks, self.begin = page, 0, time.perf_counter()

    def click(self, selector: str) -> None:
        """Click on something."""
        self.page.click(selector)
        self.clicks += 1

    def choose(self, label: str, value: str) -> None:
        """Choose from a menu."""
        self.page.select_option(f"label:has-text('{label}') select", value)
        self.clicks += 1

    def answer(self, selector: str) -> tuple[int, float]:
        """Wait until the answer can be read; return the clicks and the seconds that it took."""
        self.page.wait_for_selector(selector)
        return self.clicks, time.perf_counter() - self.begin


def _start(page: Any) -> Reader:
    """Open the page that `sonde view` opens, scripts and all; the time begins as it is asked for."""
    go(page, "#/runs")
    reader = Reader(page)
    page.reload()
    page.wait_for_selector("main[data-ready]")
    return reader


def ask_about_a_sweep(page: Any) -> dict[int, tuple[int, float]]:
    """Answer questions 1 to 5; return the clicks and seconds of each."""
    found = {}
    reader = _start(page)  # 1: which run is best
    page.wait_for_selector("td[data-title='val_acc, best']")
    for _ in range(2):
        reader.click("th button:has-text('val_acc, best')")
    found[1] = reader.answer("table[aria-label=Runs] tbody tr:first-child[data-key='0-lr0.01-seed1']")
    reader = _start(page)  # 2: which setting is best, over seeds
    page.wait_for_selector("label:has-text('Group by') option[value=lr]", state="attached")
    reader.choose("Group by", "lr")
    found[2] = reader.answer("tr[data-key='group lr=0.01'] >> text=±")
    found[3] = _start(page).answer(
        "tr[data-key='0-failed'] a.severity[title*='train.py:7']"
    )  # 3: what went wrong, and why
    found[4] = _start(page).answer("tr[data-key='0-lr0.01-seed1'] td[data-title='lr']:has-text('0.01')")  # 4: settings
    reader = _start(page)  # 5: which layer differs between the settings
    page.wait_for_selector("label:has-text('Group by') option[value=lr]", state="attached")
    reader.choose("Group by", "lr")
    page.wait_for_selector("tr[data-key='group lr=0.01']")
    reader.click("a.button:has-text('Compare all')")
    found[5] = reader.answer("table[aria-label='Layers that differ'] tr[data-key='head:output']")
    return found


def ask_about_samples(page: Any) -> dict[int, tuple[int, float]]:
    """Answer questions 6 to 10; return the clicks and seconds of each."""

    def open_tab(tab: str) -> Reader:
        reader = _start(page)
        reader.click("tr[data-key='0-digits_run_0'] a.name")
        page.wait_for_selector("main[data-page=overview][data-ready]")
        reader.click(f"#bar nav a:text-is('{tab}')")
        return reader

    found = {}
    reader = open_tab("Samples")  # 6: which digits are confused
    found[6] = reader.answer("text=Most confused: ")
    reader.click("table.confusion td:not(.right) button >> nth=0")  # 7: show me those
    page.wait_for_selector(".chip:has-text('label == ')")
    found[7] = reader.answer(".sampletile.wrong canvas")
    reader = open_tab("Samples")  # 8: which predictions differ from another run's
    reader.choose("Compare with", "0-digits_run_1")
    found[8] = reader.answer("table[aria-label='Changed predictions'] tbody tr")
    reader = open_tab("Good against failed")  # 9: what do the failed samples have in common
    found[9] = reader.answer("table[aria-label^='What separates'] tbody tr[data-key]")
    reader = open_tab("Logs")  # 10: what printed it, and where
    found[10] = reader.answer("section[aria-label='Code that ran']")
    return found
