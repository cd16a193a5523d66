"""Train a small CNN on digits with everything recorded, and show what was seen: layers, and the samples that fail.

Then train a network that has three mistakes, and show what Sonde finds.

    python examples/demo.py [--run runs/digits] [--epochs 6]

This is what `make demo` runs. It trains what `digits_config.py` describes; a loop of your own needs only `sonde.watch`.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from pathlib import Path
from typing import Any

import broken
from digits_config import config
from rich.console import Console
from rich.table import Table
from rich.text import Text

import sonde
from sonde.training import Moment, SupervisedTrainer
from sonde.views.terminal import Look, TrainingProgress, make_console, picture, print_summary

EVERYTHING = ("parameters", "gradients", "updates", "outputs", "output_gradients", "optimizer_state")


def train(path: Path, epochs: int, console: Console) -> SupervisedTrainer:
    settings = config | {"work_dir": str(path), "epochs": epochs, "watch": {"what": EVERYTHING}}
    trainer = SupervisedTrainer(settings)
    with contextlib.ExitStack() as stack:

        def begin(seen: Any) -> None:
            progress = stack.enter_context(TrainingProgress(trainer.num_steps, title="digits", console=console))
            trainer.on(Moment.after_train_step, lambda seen: progress.update(seen.step, loss=float(seen.loss)))

        trainer.on(Moment.before_run, begin)
        trainer.run()
    return trainer


def show_worst(trainer: SupervisedTrainer, path: Path, console: Console) -> None:
    """Draw the digits with the largest loss beside what Grad-CAM says the network looked at."""
    epoch = path / f"epoch_{trainer.tot_epochs - 1}"
    samples = sonde.load_debug_outputs(epoch / "samples")
    captured = sonde.load_debug_outputs(epoch / "debugger")
    look = Look.of(console)
    table = Table.grid(padding=(0, 4))
    titles, images, views = [], [], []
    for number, loss in trainer.scores.worst("loss", 3):
        sample: Any = samples[number]
        verdict = f"a {int(sample['labels'])}, taken for a {int(sample['prediction'])}"
        titles.append(Text(f"sample {number}\n{verdict}\nloss {loss:.2f}"))
        images.append(picture(sample["inputs"][0], look))
        views.append(picture(captured[number]["where_it_looks"]["gradcam"][0], look))
    for row in (titles, images, [Text("")] * len(images), views):
        table.add_row(*row)
    console.print(Text("\nworst samples of the last epoch: the digit, and where the network looked", style="bold"))
    console.print(table)
    console.print(f"\nsonde.load_debug_outputs('{epoch / 'debugger'}') holds all {len(captured)}.", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/digits"))
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    if (options.run / "run.json").exists():
        shutil.rmtree(options.run)  # the demo's own earlier run; Sonde itself never overwrites one
    console = make_console()
    trainer = train(options.run, options.epochs, console)
    print_summary(sonde.open_run(options.run), console)
    show_worst(trainer, options.run, console)
    broken.main(options.run.with_name("broken"), console)


if __name__ == "__main__":
    main()
