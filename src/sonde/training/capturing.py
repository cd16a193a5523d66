"""What trainers and evaluators ask of a debugger: captures on, into this folder, with these scores, off.

A debugger needs `enabled`, `reset_buffer()`, `save_all(folder)` and to be callable. Two things more are used where it
has them: `open(folder, ...)`, so that captures are on disk as they come and not only at the end, and
`save_all(scores=...)`, so that it can keep the captures of bad samples only.
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

from sonde.training.moments import Split
from sonde.training.scores import Scores


def set_enabled(debugger: Any, enabled: bool) -> None:
    """Switch captures on or off, if there is a debugger."""
    if debugger is not None:
        debugger.enabled = enabled


def begin_captures(debugger: Any, folder: Path, epoch: int | None, split: Split) -> None:
    """Switch captures on, for one folder."""
    if debugger is None:
        return
    debugger.enabled = True
    debugger.reset_buffer()
    if hasattr(debugger, "open"):
        debugger.open(folder, epoch=epoch, split=split)


def end_captures(debugger: Any, folder: Path, scores: Scores, monitor: str | None) -> None:
    """Save what was captured, and switch captures off. Nothing is done where they are off already."""
    if debugger is None or not debugger.enabled:
        return
    if monitor in scores.directions and _takes_scores(debugger):
        by_sample = {
            sample: float(score) if not isinstance(score, list) else math.fsum(score) / len(score)
            for sample, score in zip(scores.ids, scores.per_datapoint.get(monitor, []), strict=True)
        }
        debugger.save_all(str(folder), scores=by_sample, higher_is_better=scores.directions[monitor] > 0)
    else:
        debugger.save_all(str(folder))
    debugger.enabled = False


def _takes_scores(debugger: Any) -> bool:
    return "scores" in inspect.signature(debugger.save_all).parameters


def close(debugger: Any) -> None:
    """Let go of the model, where the debugger knows how to."""
    if hasattr(debugger, "close"):
        debugger.close()
