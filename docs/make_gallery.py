"""Draw the gallery: train for real, then make a picture of every figure, page and terminal view.

python docs/make_gallery.py [--out docs/images] [--runs runs/gallery] [--steps 240]

Two runs of the same small transformer on digits: one as it should be, one that forgets to clear its gradients. What the
pictures show was recorded in these runs; nothing is made up. Pictures are taken by a real browser without a network.
"""

from __future__ import annotations

import argparse
import io
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from sklearn.datasets import load_digits
from torch import nn

import sonde
from sonde.debug import DebugVisualizer, TerminalVisualizer, VisualizationConfig
from sonde.views import figures
from sonde.views.document import figure_page
from sonde.views.report import render_report
from sonde.views.terminal import print_summary

ROOT = Path(__file__).parents[1]
WIDTH = 860
# Rich's own format loads a web font; a picture must stand alone.
STANDALONE_SVG = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S).replace(
    "font-family: Fira Code, monospace", "font-family: DejaVu Sans Mono, Menlo, monospace"
)
EVERYTHING = ("parameters", "gradients", "updates", "outputs")


class Block(nn.Module):
    """Attention and a small network, each added to what goes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.weights: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        y, weights = self.attention(y, y, y, average_attn_weights=False)
        self.weights = weights.detach()
        x = x + y
        return x + self.mlp(self.norm2(x))


class DigitTransformer(nn.Module):
    """Reads a digit of 8 by 8 pixels as 16 patches of 2 by 2."""

    def __init__(self, width: int = 48, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = x.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        return self.head(self.norm(self.blocks(self.embed(patches) + self.place)).mean(1))


def train(path: Path, steps: int, *, clear: bool = True) -> DigitTransformer:
    """Train, and return the model. Without `clear`, gradients pile up from step to step."""
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    data = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    model = DigitTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loss_fn = nn.CrossEntropyLoss()
    with sonde.watch(model, optimizer, run=path, what=EVERYTHING) as session:
        done = 0
        while done < steps:
            session.epoch(done // len(loader))
            for x, y in loader:
                if clear:
                    optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                scheduler.step()
                session.log(loss=loss)
                done += 1
                if done >= steps:
                    break
            model.eval()
            with torch.no_grad():
                out = model(images[1500:])
                session.log(
                    val_loss=loss_fn(out, labels[1500:]), val_accuracy=(out.argmax(1) == labels[1500:]).float().mean()
                )
            model.train()
    return model


def draw(good: sonde.Run, bad: sonde.Run, model: DigitTransformer) -> dict[str, Any]:
    """Return every figure by the name of its picture."""
    block: Any = model.blocks[1]
    torch.manual_seed(0)
    model(torch.tensor(load_digits().images[1500:1501] / 16, dtype=torch.float32))
    site = "blocks.1.mlp.0.weight:gradient"
    tokens = [f"{'abcd'[i // 4]}{i % 4 + 1}" for i in range(16)]
    return {
        "training-metrics": figures.training_metrics(good),
        "gradient-flow": figures.gradient_flow(good),
        "gradients-over-time": figures.gradient_flow_over_time(good),
        "layer-heatmap": figures.layer_heatmap(good, "re:.*weight:gradient"),
        "histogram-over-time": figures.histogram_over_time(good, site),
        "ridges": figures.histogram_over_time(good, site, kind="ridge"),
        "tensor-distribution": figures.tensor_distribution(model.head.weight, name="head.weight", bins=40),
        "magnitudes": figures.tensor_distribution(good, site),
        "update-ratio": figures.update_ratio(good),
        "activations": figures.activation_patterns(good),
        "attention": figures.attention(block.weights, tokens=tokens, name="blocks.1.attention"),
        "model-tree": figures.model_tree(good),
        "step-phases": figures.step_phases(good),
        "memory": figures.memory_timeline(good),
        "events": figures.event_timeline(bad),
        "compare-runs": figures.compare_runs({"cleared": good, "never cleared": bad}),
    }


def terminal_views(good: sonde.Run, bad: sonde.Run, model: DigitTransformer) -> dict[str, str]:
    """Return terminal views as SVG, by the name of their picture."""
    drawing = TerminalVisualizer(92, 14, mode="braille", colours="truecolor")
    loss = good.series("loss", "value")
    gradients = [good.series(f"blocks.{i}.mlp.0.weight:gradient", "rms") for i in range(3)]
    parts = [
        drawing.ascii_line_plot(loss.steps, loss.values, "Training loss", log=True),
        drawing.heat_map(
            [each.values for each in gradients], [each.site.name for each in gradients], "Gradients", log=True
        ),
        drawing.ascii_histogram(model.head.weight, 10, "head.weight"),
        drawing.display_statistics("head.weight", model.head.weight),
    ]
    drawings = Text.from_ansi("\n\n".join(parts))
    return {
        "terminal": _recorded(lambda console: console.print(drawings), 92, "TerminalVisualizer"),
        "terminal-show": _recorded(lambda console: print_summary(bad, console), 100, "sonde show runs/never-cleared"),
    }


def _recorded(show: Any, width: int, title: str) -> str:
    console = Console(record=True, width=width, force_terminal=True, color_system="truecolor", file=io.StringIO())
    show(console)
    console.print()  # the last line would be cut
    return console.export_svg(title=title, theme=MONOKAI, code_format=STANDALONE_SVG)


@contextmanager
def open_browser() -> Iterator[Browser]:
    chromium = runpy.run_path(str(ROOT / "tests" / "browser" / "chromium.py"))
    path = chromium["find"]()
    if path is None:
        sys.exit(chromium["MISSING"])
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--hide-scrollbars"])
        yield running
        running.close()


def open_page(
    browser: Browser, html: str, folder: Path, *, width: int = WIDTH, height: int = 900, theme: str = "light"
) -> Page:
    file = folder / "page.html"
    file.write_text(html, encoding="utf-8")
    context = browser.new_context(offline=True, viewport={"width": width, "height": height}, color_scheme=theme)
    page = context.new_page()
    page.goto(file.resolve().as_uri())
    return page


def drawn(page: Page) -> Page:
    page.wait_for_selector("html[data-ready]", timeout=120_000)
    page.add_style_tag(content="#theme { display: none } main { padding: 16px 20px 0 !important }")
    return page


def shrink(folder: Path) -> None:
    """Give the pictures of a folder a palette of 256 colours: a third of the bytes, and no difference to be seen."""
    for file in folder.glob("*.png"):
        with Image.open(file) as picture:
            if picture.mode != "P":
                small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
                small.save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--runs", type=Path, default=Path("runs/gallery"))
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--reuse", action="store_true", help="take the runs that are there already")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.reuse:
        torch.save(train(options.runs / "good", options.steps).state_dict(), options.runs / "model.pt")
        train(options.runs / "never-cleared", options.steps, clear=False)
    model = DigitTransformer()
    model.load_state_dict(torch.load(options.runs / "model.pt"))
    good, bad = sonde.open_run(options.runs / "good"), sonde.open_run(options.runs / "never-cleared")
    figs = draw(good, bad, model)
    visualizer = DebugVisualizer(VisualizationConfig(output_directory=options.runs))
    visualizer.plot_run(good)
    with open_browser() as browser:
        page = drawn(open_page(browser, figure_page("", list(figs.values())), options.runs))
        for number, name in enumerate(figs):
            page.locator(f"[data-figure='{number}']").screenshot(path=options.out / f"figure-{name}.png")
        dashboard = visualizer.create_dashboard().read_text()
        page = drawn(open_page(browser, dashboard, options.runs, width=1240, height=1000, theme="dark"))
        page.screenshot(path=options.out / "dashboard.png")
        page = drawn(open_page(browser, render_report(bad), options.runs, width=1100, height=1120))
        page.screenshot(path=options.out / "report.png")
        for name, html in terminal_views(good, bad, model).items():
            page = open_page(browser, html, options.runs)
            page.locator("svg").first.screenshot(path=options.out / f"{name}.png")
    shrink(options.out)
    total = sum(file.stat().st_size for file in options.out.glob("*.png"))
    print(f"{len(list(options.out.glob('*.png')))} pictures in {options.out}, {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
