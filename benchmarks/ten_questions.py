"""Measure how long the ten questions of docs/ten-questions.md take, and write clicks and seconds into that page.

    python -m benchmarks.ten_questions            print clicks and seconds, in the viewer and in TensorBoard
    python -m benchmarks.ten_questions --write    and write them into the page

Seconds run from the opening of the first page until the answer can be read, with clicks that follow each other at once:
what the tool needs, without the reader's own time. TensorBoard gets the same sweep, exported and with its settings, and
is asked those questions that it has a page for.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright
from tests.analysis.swept_runs import write_sweep
from tests.browser import chromium
from tests.browser.questions import Reader, ask_about_a_sweep, ask_about_samples
from tests.browser.sampled_runs import train_digits
from tests.browser.serving import Window, serving

from sonde.analysis.export_formats import export_tensorboard
from sonde.analysis.sweep import read_row
from sonde.store import open_run

PAGE = Path(__file__).parents[1] / "docs" / "ten-questions.md"
TURNS = 3
"""The first turn opens the runs; the median of all is what counts."""


def measure(folder: Path) -> dict[int, tuple[int, float]]:
    """Return clicks and the median of seconds of each question."""
    write_sweep(folder / "sweep")
    for seed in range(2):
        train_digits(folder / "digits" / f"digits_run_{seed}", seed)
    found: dict[int, list[tuple[int, float]]] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium.find(), args=["--no-sandbox"])
        for name, ask in (("sweep", ask_about_a_sweep), ("digits", ask_about_samples)):
            with serving(folder / name) as viewer:
                window = Window(browser, viewer)
                for _ in range(TURNS):
                    for number, taken in ask(window.page).items():
                        found.setdefault(number, []).append(taken)
        browser.close()
    return medians(found)


def medians(found: dict[int, list[tuple[int, float]]]) -> dict[int, tuple[int, float]]:
    """Return the turn of each question that took the median of seconds."""
    return {number: sorted(turns, key=lambda each: each[1])[TURNS // 2] for number, turns in found.items()}


# --------------------------------------------------------------------------------
# TensorBoard, with the same sweep.


def measure_tensorboard(folder: Path) -> dict[int, tuple[int, float]]:
    """Return clicks and the median of seconds of the questions that TensorBoard has a page for."""
    from torch.utils.tensorboard import SummaryWriter

    (folder / "logs").mkdir()
    for path in sorted((folder / "sweep").iterdir()):
        run = open_run(path)
        logs = folder / "logs" / path.name
        export_tensorboard(run, run.sites, None, logs)
        row = read_row(run)
        settings = {name: each for name, each in row.settings.items() if isinstance(each, int | float | str)}
        writer = SummaryWriter(str(logs))
        writer.add_hparams(settings, {"best val_acc": row.metrics["val_acc"].best}, run_name=".")
        writer.close()
    found: dict[int, list[tuple[int, float]]] = {}
    with sync_playwright() as playwright, tensorboard(folder / "logs") as address:
        browser = playwright.chromium.launch(executable_path=chromium.find(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1366, "height": 768})
        for _ in range(TURNS):
            for number, taken in ask_tensorboard(page, address).items():
                found.setdefault(number, []).append(taken)
        browser.close()
    return medians(found)


@contextmanager
def tensorboard(logs: Path, port: int = 6124) -> Iterator[str]:
    """Start TensorBoard, and wait until it has read all runs."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address, end = f"http://127.0.0.1:{port}/", time.monotonic() + 120
    try:
        known = 0
        while known < len(list(logs.iterdir())) and time.monotonic() < end:
            time.sleep(0.5)
            with suppress(OSError):  # it may not listen yet
                known = len(json.load(urllib.request.urlopen(f"{address}data/runs")))
        yield address
    finally:
        process.terminate()
        process.wait(20)


def ask_tensorboard(page: Page, address: str) -> dict[int, tuple[int, float]]:
    """Answer questions 1 and 4; return the clicks and seconds of each."""
    found = {}
    page.goto("about:blank")
    reader = Reader(page)  # 1: which run is best: the table below the curves, sorted by value
    page.goto(address)
    card = "scalar-card:has-text('best val_acc')"
    best = f"{card} tb-data-table-content-row >> nth=0 >> text=lr0.01-seed1"
    page.wait_for_selector(f"{card} tb-data-table-content-row")
    while not page.locator(best).is_visible() and reader.clicks < 5:
        reader.click(f"{card} tb-data-table-header-cell:has-text('Value')")
        page.wait_for_timeout(50)
    found[1] = reader.answer(best)
    page.goto("about:blank")
    reader = Reader(page)  # 4: what was set differently: the table of settings
    page.goto(address)
    reader.click("[data-plugin-id=hparams]")
    found[4] = reader.answer("vaadin-grid-cell-content:has-text('0.0010000') >> nth=0")
    return found


# --------------------------------------------------------------------------------


def write(found: dict[int, tuple[int, float]], other: dict[int, tuple[int, float]], page: Path = PAGE) -> None:
    """Write clicks and seconds into the rows of the page: those of the viewer, and those of TensorBoard."""

    def row(match: re.Match[str]) -> str:
        clicks, seconds = found[int(match["number"])]
        return f"| {match['number']} | {match['question']} | {clicks} | {seconds:.1f} |"

    def row_of_other(match: re.Match[str]) -> str:
        clicks, seconds = other[int(match["number"])]
        return f"| {match['number']} | {clicks}, {seconds:.1f} s:"

    text = page.read_text("utf-8")
    pattern = r"^\| (?P<number>\d+) \| (?P<question>[^|]+) \| \d+ \| [\d.]+ \|"
    text = re.sub(pattern, row, text, flags=re.MULTILINE)
    text = re.sub(r"^\| (?P<number>\d+) \| \d+, [\d.]+ s:", row_of_other, text, flags=re.MULTILINE)
    page.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the seconds into docs/ten-questions.md")
    options: Any = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
        other = measure_tensorboard(Path(folder))
    for name, each in (("Sonde", found), ("TensorBoard", other)):
        for number, (clicks, seconds) in sorted(each.items()):
            print(f"  {name}, question {number:>2}: {clicks} clicks, {seconds:.2f} s")
    if options.write:
        write(found, other)


if __name__ == "__main__":
    main()
