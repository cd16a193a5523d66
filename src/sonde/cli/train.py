"""`sonde train --config-filepath F`: train what a config describes."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.answer import print_json
from sonde.cli.opening import AsJson
from sonde.errors import MissingExtra

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """
sonde train --config-filepath examples/digits_config.py
sonde train --config-filepath examples/digits_config.py --resume  # continue an interrupted run
"""

_LOSS_SECONDS = 0.1  # reading a loss waits for the device, so it is read this seldom

ConfigFile = Annotated[
    Path,
    typer.Option(
        "--config-filepath",
        metavar="FILE",
        help="The config: .py with config = {...}, .yaml or .json.",
        show_default=False,
    ),
]
WorkDir = Annotated[
    Path | None,
    typer.Option("--work-dir", metavar="DIR", help="The folder to write to, instead of the config's work_dir."),
]
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="The device: cpu, cuda, cuda:1.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the work_dir.")]


def train(
    config_filepath: ConfigFile,
    resume: Resume = False,
    work_dir: WorkDir = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Train the model that a config describes.

    A Python config is run: use your own, or read it first. The work_dir becomes a run that all other verbs read, also
    while it trains. Ctrl-C and SIGTERM interrupt it: what was recorded is written, and --resume continues.
    """
    from sonde.views.terminal import make_console

    training, config = load(config_filepath, work_dir)
    trainer = config.get("runner", training.SupervisedTrainer)(config, device=device)
    console = make_console(stderr=json)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending_on_sigterm())
        if not json:
            _show_progress(training, trainer, console, stack)
        trainer.run(resume=resume or None)
    if json:
        print_json(_describe(trainer))
    else:
        _print_end(trainer, console)


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Handle SIGTERM, which schedulers send to end a job, like Ctrl-C: finish the files and exit with 143."""
    stop = signal.SIGTERM
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(stop) is not signal.SIG_DFL:
        yield  # another handler is installed
        return
    signal.signal(stop, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(stop, signal.SIG_DFL)


def load(config_filepath: Path, work_dir: Path | None) -> tuple[Any, dict[str, Any]]:
    """Import what trains, and read the config.

    This verb and `sonde eval` are the only ones that need torch and run a user's code; both are loaded when they run.

    Raises:
        MissingExtra: torch is not installed.
        OptionError: The config cannot be used.

    """
    try:
        import_module("torch")
    except ImportError as error:
        raise MissingExtra("torch", "torch", "Training and evaluation") from error
    training = import_module("sonde.training")
    # As for a script: what a config imports late, in the middle of training, may lie beside it.
    sys.path.insert(0, str(config_filepath.resolve().parent))
    config = dict(training.load_config(config_filepath))
    if work_dir is not None:
        config["work_dir"] = str(work_dir)
    return training, config


def _show_progress(training: Any, trainer: Any, console: Console, stack: contextlib.ExitStack) -> None:
    from sonde.views.terminal import TrainingProgress

    moments = training.Moment
    bars: list[TrainingProgress] = []
    read = 0.0
    loss: float | None = None

    def begin(glimpse: Any) -> None:
        if trainer.num_steps is not None:
            bars.append(stack.enter_context(TrainingProgress(trainer.num_steps, console=console)))

    def step(glimpse: Any) -> None:
        nonlocal read, loss
        now = time.monotonic()
        if glimpse.loss is not None and now - read >= _LOSS_SECONDS:
            read, loss = now, float(glimpse.loss)
        for bar in bars:
            bar.update(glimpse.step, loss=loss)

    def epoch(glimpse: Any) -> None:
        # Epochs count from 0, as in the names of folders and in `sonde query`.
        where = f"epoch {glimpse.epoch} ({glimpse.epoch + 1} of {trainer.tot_epochs})"
        console.print(f"{where}  {_words(glimpse.scores)}", highlight=False)

    trainer.on(moments.before_run, begin)
    trainer.on(moments.after_train_step, step)
    trainer.on(moments.after_epoch, epoch)


def _words(scores: dict[str, float]) -> str:
    from sonde.views.terminal.style import short

    return "  ".join(f"{name} {short(value)}" for name, value in scores.items()) or "not validated"


def _describe(trainer: Any) -> dict[str, Any]:
    best = trainer.best
    return {
        "work_dir": str(trainer.work_dir),
        "epochs": trainer.tot_epochs,
        "steps": trainer.cum_steps,
        "stopped": trainer.stop_reason,
        "monitor": trainer.monitor,
        "best": None if best is None or best.epoch is None else {"epoch": best.epoch, "score": best.score},
        "scores": {str(epoch): scores for epoch, scores in trainer.history.items()},
    }


def _print_end(trainer: Any, console: Console) -> None:
    from sonde.views.terminal.style import short

    if trainer.stop_reason is not None:
        console.print(f"stopped: {trainer.stop_reason}", highlight=False)
    best = trainer.best
    if best is not None and best.epoch is not None:
        console.print(f"best {trainer.monitor} {short(best.score)} in epoch {best.epoch}", highlight=False)
    print_worst(trainer.scores, trainer.monitor, console)
    console.print(f"Run: sonde show {trainer.work_dir}", highlight=False, soft_wrap=True)


def print_worst(scores: Any, name: str | None, console: Console) -> None:
    """Name the samples that scored worst."""
    from sonde.views.terminal.style import short

    worst = scores.worst(name) if scores is not None and name is not None else []
    if worst:
        listed = ", ".join(f"{sample} ({short(score)})" for sample, score in worst)
        console.print(f"worst samples by {name}: {listed}", highlight=False, soft_wrap=True)
