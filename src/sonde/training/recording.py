"""The work_dir as a run: what a trainer's session records."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from torch import nn

from sonde.errors import OptionError
from sonde.record.plan import DEFAULT_WHAT
from sonde.session import Session
from sonde.store import layout, open_run
from sonde.watching import OPTION_NAMES, watch

# What the trainer itself knows and hands over.
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
        option: What the config says.
        what: What to record unless it says otherwise.

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
    """Return whether there is a run that ended without a word, so that its end remains to be written."""
    return (work_dir / layout.HEADER).is_file() and open_run(work_dir).status == "crashed"


def open_session(
    model: nn.Module, optimizer: Any, run_dir: Path, options: Mapping[str, Any], *, steps_done: int, **more: Any
) -> Session:
    """Begin to record into `run_dir`, or go on after `steps_done` steps of a run that is there."""
    # In further ranks a run that is there may have been begun by the first a moment ago: going on is right for both.
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
