"""What evaluations leave in a run, as those who write it and those who read it call it.

run/
  epoch_4/                      the validation of an epoch
    validation_scores.json
    debugger/                   captures, as pages
    samples/                    samples that were kept, as pages
  test/test_results.json        the test at the end
  evaluation_scores.json        an evaluation by itself, with `debugger/` and `samples/` beside it
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

CAPTURES: Final = "debugger"
KEPT: Final = "samples"
VALIDATION_SCORES: Final = "validation_scores.json"
TEST: Final = "test"
TEST_SCORES: Final = "test_results.json"
EVALUATION_SCORES: Final = "evaluation_scores.json"

_EPOCH: Final = re.compile(r"epoch_(\d{1,9})")


def epoch_folder(run: Path, epoch: int) -> Path:
    """Return the folder of an epoch."""
    return run / f"epoch_{epoch}"


def epoch_of(folder_name: str) -> int | None:
    """Return the epoch that a folder's name stands for, or None.

    >>> epoch_of("epoch_4"), epoch_of("epochs")
    (4, None)
    """
    match = _EPOCH.fullmatch(folder_name)
    return int(match[1]) if match else None
