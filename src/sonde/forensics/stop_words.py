"""What `sonde.NonFiniteError` says about the step and the weights; cause and cure come from the finding."""

from __future__ import annotations


def held_words(later: int) -> str:
    """Say that the optimizer was held back, `later` steps before it was known."""
    unchanged = f"those of {later} step(s) later" if later > 0 else "as they were"
    return f"gradients are not finite, and guard='stop' held the optimizer back; the weights are {unchanged}."


def late_words(step: int, taken: int) -> str:
    """Say that it began in a step, from which on `taken` steps were taken before it was known."""
    if not taken:
        return "gradients are not finite; guard='stop_late' saw it before anything was written: the weights are whole."
    return (
        f"gradients or weights are not finite. guard='stop_late' holds nothing back: {taken} step(s) were taken, this "
        f"one included, until the readings showed it, and the weights may be spoilt. Go back to a checkpoint from "
        f"before step {step}."
    )
