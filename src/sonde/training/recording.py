"""Record a trainer's work_dir as a run."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from torch import nn

from sonde.errors import OptionError
from sonde.options import OPTION_NAMES
from sonde.record.plan import DEFAULT_WHAT
from sonde.session import Session
from sonde.store import layout, open_run
from sonde.watching import watch

# Set by the trainer itself.
_OWN: Final = {
    "resume",
    "start_step",
    "loss_fn",
    "loader",
    "scheduler",
    "scaler",
    "config",
}
_OPTIONS: Final = OPTION_NAMES - _OWN


def watch_options(option: Any, what: tuple[str, ...] = DEFAULT_WHAT) -> dict[str, Any]:
    """Return the arguments of `sonde.watch` that a config's `watch` asks for: a dict, True, False or None.

    Args:
        option: The value in the config.
        what: What to record by default.

    Raises:
        OptionError: It names something that `watch` does not take.

    """
    if option is None or option is True:
        return {"what": what}
    if option is False:
        return {"enabled": False}
    if not isinstance(option, Mapping):
        raise OptionError(f"watch takes a dict of options, True or False; got {option!r:.80}.")
    for key in option:
        if key not in _OPTIONS:
            near = get_close_matches(str(key), _OPTIONS, n=1) or sorted(_OPTIONS)
            raise OptionError(f"watch has no option {key!r} (nearest: {', '.join(near)}).")
    return {"what": what, **option}


def was_cut_off(work_dir: Path) -> bool:
    """Return whether the folder holds a run that was cut off, so that its end has not been recorded."""
    return (work_dir / layout.HEADER).is_file() and open_run(work_dir).status == "crashed"


def open_session(
    model: nn.Module, optimizer: Any, run_dir: Path, options: Mapping[str, Any], *, steps_done: int, **more: Any
) -> Session:
    """Start recording into `run_dir`, or continue an existing run after `steps_done` steps."""
    # The run may have been started by rank 0 a moment ago: continuing it is right in both cases.
    resume = (run_dir / layout.HEADER).is_file()
    return watch(
        model,
        optimizer,
        run=run_dir,
        resume=resume,
        start_step=steps_done + 1 if resume else None,
        **more,
        **options,
    )
