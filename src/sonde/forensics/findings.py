"""Turn the origin of a non-finite number into the finding that a user reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from sonde.forensics.origin import Origin
from sonde.forensics.reasons import Reason, reason_for
from sonde.hooks.user_line import Line
from sonde.records import Evidence, Finding

_KINDS: Final = {
    "data": "nan_in_data",
    "weights": "nan_in_weights",
    "forward": "nan_forward",
    "loss": "nan_in_loss",
    "backward": "nan_backward",
    "optimizer": "nan_in_optimizer",
}
_BY_REASON: Final = {
    "fully_masked_row": "fully_masked_attention",
    "fp16_overflow": "fp16_overflow",
    "no_valid_target": "empty_target",
}
_WATCH_ON: Final = 'Train with guard="skip": it keeps the weights whole and names the operation when it comes again.'
_IN_LOSS: Final = (
    "Look at the code between the model's output and backward(). Without checkpoints and hooks on saved tensors there, "
    "its operation can be named."
)
_REFUTE: Final = "Repeat the step with the named operation bounded: if it is still not finite, the origin is elsewhere."


def finding_of(origin: Origin, step: int, history: list[dict[str, Any]] | None = None) -> Finding:
    """Return the finding about one origin; `history` are the values at that place in the last steps."""
    reason = reason_for(origin) if origin.op else None
    kind = _BY_REASON.get(reason.key if reason else "", _KINDS[origin.stage])
    if origin.stage in ("data", "weights"):
        kind = _KINDS[origin.stage]
    evidence = (
        (Evidence(name="elements that are not finite", value=origin.count, threshold=0, relation=">"),)
        if origin.count
        else ()
    )
    data: dict[str, Any] = {"origin": origin.to_json()}
    if reason is not None:
        data["reason"] = reason.key
    if history:
        data["last_steps"] = history
    return Finding(
        kind=kind,
        severity="critical",
        exact=origin.repeated and len(origin.candidates) < 2,
        step=step,
        last_step=step,
        sites=_sites(origin),
        evidence=evidence,
        cause=_cause(origin, reason),
        fix=_fix(origin, reason),
        refute=_REFUTE,
        data=data,
    )


def _sites(origin: Origin) -> tuple[str, ...]:
    if origin.stage == "data":
        return ("loader",)
    if origin.stage == "loss":
        return ("loss_fn",)
    if origin.stage == "weights":
        return (origin.tensor or origin.module,)
    if origin.stage == "optimizer":
        return ("optimizer", origin.tensor) if origin.tensor else ("optimizer",)
    return (origin.module or "loss_fn",)


def _cause(origin: Origin, reason: Reason | None) -> str:
    words = {
        "data": _data_words,
        "weights": _weight_words,
        "optimizer": _optimizer_words,
    }.get(origin.stage)
    if words is not None:
        return words(origin)
    where = _where(origin)
    made = "NaN" if origin.makes == "nan" else "infinity"
    what = f"`{origin.function}`{where} made the first {made}"
    if origin.stage == "backward":
        what = f"the backward of {what}" if origin.function else f"the first {made} appears in the backward{where}"
        what += "; the forward and the loss are finite"
    elif not origin.function and origin.after is not None:
        what = f"the first {made} was made {_between(origin.after, origin.before)}"
    elif not origin.function:
        what = f"the first {made} appears{where}"
    because = f": {reason.words}" if reason is not None else ""
    return _sentence(what + because + _who(origin))


def _data_words(origin: Origin) -> str:
    made = "NaN" if origin.makes == "nan" else "an infinity"
    if origin.tensor == "other" and origin.name in ("mul", "div"):
        # What a loop multiplies or divides by is rarely the target: it is a weight, a mask or a scale.
        return _sentence(
            f"what `{origin.function}`{_where(origin)} multiplies or divides by holds {made}: "
            f"{origin.count} of {origin.total} elements" + _who(origin)
        )
    which = "target" if origin.tensor in ("target", "other") else f"input {origin.tensor}".rstrip()
    return _sentence(f"the batch holds {made}: {origin.count} of {origin.total} elements of the {which}" + _who(origin))


def _weight_words(origin: Origin) -> str:
    made = "NaN" if origin.makes == "nan" else "an infinity"
    return _sentence(
        f"`{origin.tensor}` held {made} before the forward of this step ({origin.count} of {origin.total} elements)"
    )


def _optimizer_words(origin: Origin) -> str:
    return _sentence(
        f"the gradients are finite, but the optimizer's update made `{origin.tensor or 'parameters'}` non-finite "
        f"({origin.count} of {origin.total} elements){_settings(origin)}"
    )


def _settings(origin: Origin) -> str:
    named = [f"{name}={value}" for name, value in origin.scalars.items()]
    return f"; {', '.join(named)}" if named else ""


def _fix(origin: Origin, reason: Reason | None) -> str:
    fixes = {
        "data": "Remove or repair these samples where the data is read: "
        "assert torch.isfinite(batch).all() in the dataset, or torch.nan_to_num.",
        "weights": "Something wrote it between the steps: look at code that changes weights by hand, at a loaded "
        "checkpoint, or at earlier steps that were not recorded.",
        "optimizer": "Lower the learning rate, give Adam an eps above 0 (1e-8), and clip gradients "
        "(torch.nn.utils.clip_grad_norm_).",
    }
    if reason is None:
        reads_only = not origin.repeated and origin.stage != "loss"
        return fixes.get(origin.stage) or (_WATCH_ON if reads_only else _IN_LOSS)
    return fixes.get(origin.stage) or reason.fix


def _where(origin: Origin) -> str:
    module = f" in {origin.module}" if origin.module else ""
    line = f" at {Path(origin.line.file).name}:{origin.line.number}" if origin.line is not None else ""
    text = f" (`{origin.line.text}`)" if origin.line is not None and origin.line.text else ""
    return module + line + text


def _between(after: Line, before: Line | None) -> str:
    """Return the lines that an operation lies between: behind one whose result is finite."""
    name, text = Path(after.file).name, f" (`{after.text}`)" if after.text else ""
    start = f"after {name}:{after.number}{text}, whose result is finite"
    if before is None or before.file != after.file or before.number <= after.number:
        return start
    between = range(after.number + 1, before.number)
    lines = [each for number in between if (each := Line(after.file, number)).text.strip()]
    if len(lines) == 1:
        return f"at {name}:{lines[0].number} (`{lines[0].text.strip()}`), {start}"
    return f"between lines {after.number} and {before.number} of {name}, {start}"


def _who(origin: Origin) -> str:
    if not origin.samples or origin.batch_size is None:
        return ""
    if len(origin.samples) == origin.batch_size:
        return "; all samples of the batch are hit" if origin.batch_size > 1 else ""
    named = ", ".join(map(str, origin.samples[:5])) + (", ..." if len(origin.samples) > 5 else "")
    return f"; sample{'s' if len(origin.samples) > 1 else ''} {named} of the batch"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


# --------------------------------------------------------------------------------
# What `sonde.NonFiniteError` says about the step and the weights; cause and cure come from the finding.


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
