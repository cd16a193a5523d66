"""`sonde eval --config-filepath F`: evaluate what a config describes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.answer import print_json
from sonde.cli.opening import AsJson
from sonde.cli.train import ConfigFile, Device, WorkDir, ending_on_sigterm, load, print_worst

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """
sonde eval --config-filepath examples/digits_eval_config.py
sonde eval --config-filepath F --checkpoint runs/first/epoch_4/checkpoint.pt  # another checkpoint
"""

Checkpoint = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="FILE", help="The checkpoint, instead of the config's checkpoint_filepath."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing evaluation in the work_dir.")]


def evaluate(
    config_filepath: ConfigFile,
    checkpoint: Checkpoint = None,
    overwrite: Overwrite = False,
    work_dir: WorkDir = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Evaluate the model that a config describes.

    Captures what the config's debuggers see of every sample. A Python config is run: use your own, or read it first.
    Checkpoints run no code.
    """
    from sonde.views.terminal import make_console

    training, config = load(config_filepath, work_dir)
    if checkpoint is not None:
        config["checkpoint_filepath"] = str(checkpoint)
    evaluator = config.get("runner", training.BaseEvaluator)(config, device=device)
    console = make_console(stderr=json)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending_on_sigterm())
        if not json:
            _show_progress(training, evaluator, console, stack)
        scores = evaluator.run(overwrite=overwrite or None)
    if json:
        aggregated, worst = scores.aggregated, scores.worst(evaluator.monitor) if evaluator.monitor else []
        print_json(
            {"work_dir": str(evaluator.work_dir), "scores": aggregated, "worst": [sample for sample, _ in worst]}
        )
    else:
        _print_end(evaluator, scores, console)


def _show_progress(training: Any, evaluator: Any, console: Console, stack: contextlib.ExitStack) -> None:
    from sonde.views.terminal import TrainingProgress

    bars: list[TrainingProgress] = []

    def begin(glimpse: Any) -> None:
        if glimpse.num_batches is not None:
            bar = TrainingProgress(glimpse.num_batches, title="evaluating", console=console)
            bars.append(stack.enter_context(bar))

    def step(glimpse: Any) -> None:
        for bar in bars:
            bar.update(glimpse.batch)

    evaluator.on(training.Moment.before_eval_loop, begin)
    evaluator.on(training.Moment.after_eval_step, step)


def _print_end(evaluator: Any, scores: Any, console: Console) -> None:
    from sonde.views.terminal.style import short

    found = "  ".join(f"{name} {short(value)}" for name, value in scores.flat().items()) or "no scores"
    console.print(f"{len(scores.ids)} samples  {found}", highlight=False, soft_wrap=True)
    print_worst(scores, evaluator.monitor, console)
