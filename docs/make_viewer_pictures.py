"""Take a picture of every page of the viewer, as `sonde view` shows it in a real browser.

python docs/make_viewer_pictures.py [--out docs/images] [--runs runs]

The runs are those of the demo (digits) and of the gallery: what the pictures show was recorded in them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from make_gallery import open_browser, shrink
from tests.browser.serving import go, serving, settle

ROOT = Path(__file__).parents[1]
MOST_BYTES = 100_000
WIDTH, HEIGHT = 1240, 700
HEIGHTS = {"runs": 260, "layers": 610, "contrast": 560, "sample": 800, "compare": 640}
BAD, GOOD, DIGITS = "1-never-cleared", "0-good", "2-digits"


def compare(page: Page) -> None:
    go(page, f"#/compare?run={GOOD}&run={BAD}")


def sample(page: Page) -> None:
    """Open the worst sample whose feature maps were captured."""
    go(page, f"#/run/{DIGITS}/samples")
    page.wait_for_selector(".mapbox[data-cells]")
    rows = page.locator("table[aria-label='Samples, worst first'] tbody tr", has_text="yes")
    go(page, str(rows.first.locator("a").first.evaluate("each => each.hash")))
    page.wait_for_selector("main canvas")


def layers(page: Page) -> None:
    go(page, f"#/run/{GOOD}/layers?pattern=*.weight:gradient")


# By the name of the picture: the address, or what leads there.
PAGES: dict[str, Any] = {
    "runs": "#/runs",
    "overview": f"#/run/{BAD}/overview",
    "layers": layers,
    "samples": f"#/run/{DIGITS}/samples",
    "sample": sample,
    "contrast": f"#/run/{DIGITS}/contrast",
    "timeline": f"#/run/{BAD}/timeline",
    "profile": f"#/run/{GOOD}/profile",
    "compare": compare,
}


def take(page: Page, name: str, place: Any, out: Path) -> None:
    if callable(place):
        place(page)
    else:
        go(page, place)
    settle(page)
    page.wait_for_timeout(1200)  # thumbnails and spark lines come one after the other
    settle(page)
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHTS.get(name, HEIGHT)}
    page.screenshot(path=out / f"viewer-{name}.png", clip=clip)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--only", nargs="*", default=list(PAGES))
    options = parser.parse_args()
    roots = [options.runs / "gallery" / "good", options.runs / "gallery" / "never-cleared", options.runs / "digits"]
    with open_browser() as browser, serving(*roots) as viewer:
        context = browser.new_context(viewport={"width": WIDTH, "height": 800}, color_scheme="light")
        page = context.new_page()
        page.goto(viewer.url)
        page.wait_for_selector("tr[data-key]")
        for name in options.only:
            take(page, name, PAGES[name], options.out)
    shrink(options.out)
    for name in options.only:
        size = (options.out / f"viewer-{name}.png").stat().st_size
        print(f"viewer-{name}.png {size / 1e3:.0f} KB{', too large' if size > MOST_BYTES else ''}")


if __name__ == "__main__":
    main()
