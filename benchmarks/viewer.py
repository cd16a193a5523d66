"""What the viewer costs with a large run, measured in a real browser; and whether memory stays flat beside a training.

    python benchmarks/viewer.py                                  5,000 sites x 100,000 steps, 100,000 samples: 4 GB
    python benchmarks/viewer.py --budget-gb 60                   the same without thinning: 54 GB
    python benchmarks/viewer.py --sites 200 --steps 2000 --samples 5000     small, for a look
    python benchmarks/viewer.py --live 600                       two windows and a live training, for ten minutes
    python benchmarks/viewer.py --tensorboard                    only the row of TensorBoard, with the same readings

The run is what a training leaves when its budget is spent: its steps merged into windows. Times are seen from the page:
from the click to the picture. TensorBoard gets the readings of some of the sites as scalars.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, Page, sync_playwright
from viewer_runs import write_large, write_samples

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.browser import chromium, serving

TRAINING = """
import sys, time, torch, sonde
torch.set_num_threads(1)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
end = time.monotonic() + float(sys.argv[2])
with sonde.watch(model, optimizer, run=sys.argv[1]) as session:
    while time.monotonic() < end:
        x = torch.randn(32, 64)
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        session.log(loss=loss)
        time.sleep(float(sys.argv[3]))
"""


class Table:
    """Lines of a name and a figure; of times also how long the server computed, which other work does not stretch."""

    server: int | None = None
    """The process whose time counts."""

    def add(self, name: str, figure: str) -> None:
        print(f"  {name:<58}{figure:>28}", flush=True)

    def time(self, name: str, action: Callable[[], object]) -> None:
        begin, busy = time.perf_counter(), self._busy()
        action()
        taken = f"{(time.perf_counter() - begin) * 1e3:,.0f} ms"
        self.add(name, taken if self.server is None else f"{taken}, {self._busy() - busy:.2f} s of CPU")

    def _busy(self) -> float:
        if self.server is None:
            return 0.0
        used = psutil.Process(self.server).cpu_times()
        return float(used.user + used.system)


@contextmanager
def open_browser() -> Iterator[Browser]:
    path = chromium.find()
    if path is None:
        sys.exit(chromium.MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


def memory(pid: int) -> dict[str, float]:
    """Return a process's own memory and its pages of files, which the system takes back as it needs, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kept = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return {"own": int(kept["RssAnon"].split()[0]) / 1e3, "files": int(kept["RssFile"].split()[0]) / 1e3}


def heap(page: Page) -> float:
    """Return what a page's scripts hold after a collection, in MB."""
    devtools = page.context.new_cdp_session(page)
    devtools.send("HeapProfiler.collectGarbage")
    used = devtools.send("Runtime.getHeapUsage")["usedSize"]
    devtools.detach()
    return float(used) / 1e6


def drawn(page: Page, selector: str) -> None:
    """Wait until a figure is drawn."""
    page.wait_for_selector(f"{selector} canvas[data-drawn]", timeout=120_000)


def go(page: Page, hash_: str, selector: str | None = None) -> None:
    serving.go(page, hash_)
    if selector:
        drawn(page, selector)


CHANGE = """([hash, selector]) => new Promise((done) => {
    const begin = performance.now();
    const look = () => {
        if (document.querySelector(`main[data-ready] ${selector} canvas[data-drawn]`)) done(performance.now() - begin);
        else requestAnimationFrame(look);
    };
    document.getElementById("main").removeAttribute("data-ready");
    location.hash = hash;
    requestAnimationFrame(look);
})"""


def change(page: Page, hash_: str, selector: str) -> float:
    """Follow a link and return how many milliseconds pass until a figure is drawn, as the page itself measures them."""
    return float(page.evaluate(CHANGE, [hash_, selector]))


def bench_pages(out: Table, folder: Path) -> None:
    with open_browser() as browser:
        begin = time.perf_counter()
        with serving.serving(folder) as viewer:
            out.add("server start, until it says where", f"{(time.perf_counter() - begin) * 1e3:,.0f} ms")
            out.add("server memory at the start", f"{memory(viewer.process.pid)['own']:,.0f} MB")
            out.server = viewer.process.pid
            page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
            page.set_default_timeout(120_000)

            def first() -> None:
                page.goto(viewer.url)
                drawn(page, ".chart")

            out.time("cold: the first page with its first figure", first)
            run = page.evaluate("location.hash.split('/')[2]")  # the only run opens on its overview
            bench_layers(out, page, f"#/run/{run}")
            bench_samples(out, page, f"#/run/{run}")
            used = memory(viewer.process.pid)
            out.add("server memory at the end: own / pages of files", f"{used['own']:,.0f} / {used['files']:,.0f} MB")
            out.add("page memory at the end, scripts", f"{heap(page):,.0f} MB")
            out.server = None


def bench_layers(out: Table, page: Page, run: str) -> None:
    out.time("heat map of all layers over all steps, first time", lambda: go(page, f"{run}/layers", ".heat"))
    go(page, f"{run}/timeline")
    out.time("heat map again", lambda: go(page, f"{run}/layers", ".heat"))
    for name, figure in (("overview", ".chart"), ("layers", ".heat")) * 3:
        page.wait_for_timeout(1500)  # what a page draws last does not belong to the next one
        out.add(f"warm change to {name}", f"{change(page, f'{run}/{name}', figure):,.0f} ms")
    sites = page.evaluate(
        "[...document.querySelectorAll('.sitelist [data-site]')].slice(0, 12).map(each => each.dataset.site)"
    )

    def series() -> None:
        page.click(f".sitelist [data-site='{sites.pop()}']")
        page.wait_for_selector(f".chart .entry[title='{shown(page)}']")
        page.wait_for_selector(".chart canvas[data-drawn]")

    out.time("one site's curve over all steps, first time", series)
    out.time("the next site's curve", series)


def shown(page: Page) -> str:
    """Return the key of the site that was clicked last."""
    return str(page.evaluate("document.querySelector('.sitelist [aria-selected=true]')?.dataset.site ?? ''"))


def bench_samples(out: Table, page: Page, run: str) -> None:
    ready = ".mapbox[data-cells]"

    def samples() -> None:
        go(page, f"{run}/samples")
        page.wait_for_selector(ready)

    out.time("samples: score map and worst first, first time", samples)
    cells = page.get_attribute(ready, "data-cells")
    painting = []
    for width in (1300, 1200, 1100, 1000, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(250)
        painting.append(float(page.get_attribute(ready, "data-ms") or "nan"))
    out.add(
        f"score map of {int(cells or 0):,} cells: redraw (median)", f"{sorted(painting)[len(painting) // 2]:,.1f} ms"
    )
    worst = page.evaluate("document.querySelector('table[aria-label=\"Samples, worst first\"] tbody a').hash")

    def sample() -> None:
        go(page, worst)
        page.wait_for_selector("main canvas")

    out.time("a sample with its captured feature maps", sample)


def bench_tensorboard(out: Table, run: Path, logs: Path, tags: int) -> None:
    """Give TensorBoard the same readings of some sites, and wait until it has them all."""
    if importlib.util.find_spec("tensorboard") is None:
        out.add("TensorBoard", "not installed")
        return
    from sonde.analysis.export_formats import export_tensorboard
    from sonde.store import open_run

    shutil.rmtree(logs, ignore_errors=True)
    opened = open_run(run)
    sites = [site for site in opened.sites if site.quantity == "gradient"][:tags]
    begin = time.perf_counter()
    logs.mkdir(parents=True)
    done = export_tensorboard(opened, sites, ["rms"], logs / "run")
    taken = time.perf_counter() - begin
    out.add(f"TensorBoard: write {done['points']:,} points of {len(sites)} sites", f"{taken:,.1f} s")
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(logs),
        "--port",
        "6123",
        "--reload_interval",
        "1",
    ]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(process, "http://127.0.0.1:6123/data/environment")
        out.add("TensorBoard: server start", f"{(time.perf_counter() - begin) * 1e3:,.0f} ms")
        last = str(int(opened.series(sites[-1], "rms").steps[-1])).encode()
        tag = f"gradient_rms/{sites[-1].name}"
        query = urllib.request.quote(tag, safe="")  # type: ignore[attr-defined]
        wait_for(process, f"http://127.0.0.1:6123/data/plugin/scalars/scalars?run=run&tag={query}", last)
        out.add(f"TensorBoard: until all of {len(sites)} sites are loaded", f"{time.perf_counter() - begin:,.1f} s")
        with open_browser() as browser:
            page = browser.new_page(viewport={"width": 1440, "height": 900})

            def first() -> None:
                page.goto("http://127.0.0.1:6123/#timeseries")
                page.wait_for_selector("scalar-card canvas, scalar-card svg, line-chart", timeout=120_000)

            out.time("TensorBoard: first page with a curve", first)
        children = [process.pid, *_children(process.pid)]
        out.add("TensorBoard: memory, all processes", f"{sum(memory(pid)['own'] for pid in children):,.0f} MB")
    finally:
        process.terminate()
        process.wait(20)


def _children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def wait_for(process: subprocess.Popen[bytes], url: str, words: bytes = b"", most: float = 300.0) -> None:
    """Ask until an answer comes, with these words in it."""
    end = time.monotonic() + most
    while time.monotonic() < end and process.poll() is None:
        try:
            if words in urllib.request.urlopen(url, timeout=30).read():
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit(f"no answer from {url}")


def bench_live(out: Table, folder: Path, seconds: float, pause: float) -> None:
    """Two windows on a run that is being written: what server and pages hold, over time."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    training = subprocess.Popen([sys.executable, "-c", TRAINING, str(folder / "live"), str(seconds + 30), str(pause)])
    try:
        while not (folder / "live" / "run.json").exists():
            time.sleep(0.2)
            if training.poll() is not None:
                sys.exit("the training ended at once")
        with open_browser() as browser, serving.serving(folder) as viewer:
            rows = watch_memory(browser, viewer, seconds)
    finally:
        training.terminate()
        training.wait(30)
    settled = rows[len(rows) // 4 :]
    for name, values in zip(
        ("server", "window on overview", "window on layers"), zip(*settled, strict=True), strict=True
    ):
        quarter = max(len(values) // 3, 1)
        before, after = sum(values[:quarter]) / quarter, sum(values[-quarter:]) / quarter
        out.add(f"{name}: memory after a quarter / at the end", f"{before:,.1f} / {after:,.1f} MB")


def watch_memory(browser: Browser, viewer: Any, seconds: float) -> list[tuple[float, ...]]:
    pages = []
    for name in ("overview", "layers"):
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.goto(viewer.url)
        page.wait_for_selector("tr[data-key]")
        go(page, f"#/run/0-live/{name}", ".chart" if name == "overview" else ".heat")
        pages.append(page)
    rows, end, steps = [], time.monotonic() + seconds, ["", ""]
    while time.monotonic() < end:
        for page in pages:
            page.wait_for_timeout(1500)
        rows.append((memory(viewer.process.pid)["own"], *(heap(page) for page in pages)))
        steps = [str(page.get_attribute("#pulse", "data-step")) for page in pages]
        print(
            f"    server {rows[-1][0]:,.1f} MB, pages {rows[-1][1]:,.1f} and {rows[-1][2]:,.1f} MB at step {steps}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--budget-gb", type=float, default=4.0, help="what the run may take on disk")
    parser.add_argument("--tags", type=int, default=200, help="sites that TensorBoard gets")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-viewer"))
    parser.add_argument("--keep", action="store_true", help="leave the run there, and use one that is there")
    parser.add_argument("--live", type=float, metavar="SECONDS", help="only watch memory beside a live training")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two steps of that training")
    parser.add_argument("--tensorboard", action="store_true", help="only TensorBoard")
    options = parser.parse_args()
    out, run = Table(), options.folder / "runs" / "large"
    if options.live:
        bench_live(out, options.folder / "live", options.live, options.pause)
        return
    if not (options.keep and run.exists()):
        shutil.rmtree(options.folder / "runs", ignore_errors=True)
        begin = time.perf_counter()
        window = write_large(run, options.steps, options.sites, int(options.budget_gb * 1e9))
        write_samples(run, options.samples)
        words = f"{options.sites:,} sites x {options.steps:,} steps, in windows of {window}: written in"
        out.add(words, f"{time.perf_counter() - begin:,.1f} s")
    if not options.tensorboard:
        bench_pages(out, options.folder / "runs")
    bench_tensorboard(out, run, options.folder / "tensorboard", options.tags)
    if not options.keep:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
