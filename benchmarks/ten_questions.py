"""Measure how long the ten questions of docs/ten-questions.md take in the viewer, and write the seconds into that page.

    python -m benchmarks.ten_questions            print clicks and seconds
    python -m benchmarks.ten_questions --write    and write them into the page

Seconds run from the opening of the list of runs until the answer can be read, with clicks that follow each other at
once: what the viewer needs, without the reader's own time.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from tests.analysis.swept_runs import write_sweep
from tests.browser import chromium
from tests.browser.questions import ask_about_a_sweep, ask_about_samples
from tests.browser.sampled_runs import train_digits
from tests.browser.serving import Window, serving

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
    return {number: sorted(turns, key=lambda each: each[1])[TURNS // 2] for number, turns in found.items()}


def write(found: dict[int, tuple[int, float]], page: Path = PAGE) -> None:
    """Write clicks and seconds into the rows of the page."""

    def row(match: re.Match[str]) -> str:
        clicks, seconds = found[int(match["number"])]
        return f"| {match['number']} | {match['question']} | {clicks} | {seconds:.1f} |"

    pattern = r"^\| (?P<number>\d+) \| (?P<question>[^|]+) \| \d+ \| [\d.]+ \|"
    page.write_text(re.sub(pattern, row, page.read_text("utf-8"), flags=re.MULTILINE), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the seconds into docs/ten-questions.md")
    options: Any = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    for number, (clicks, seconds) in sorted(found.items()):
        print(f"  question {number:>2}: {clicks} clicks, {seconds:.2f} s")
    if options.write:
        write(found)


if __name__ == "__main__":
    main()
