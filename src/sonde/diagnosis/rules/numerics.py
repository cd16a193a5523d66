"""Rules about numbers that are not finite, and about low precision."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema, signals, statistics
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.nonfinite import BASIS, READINGS, Stage, count_bad, find_origin
from sonde.diagnosis.outlook import is_learning_well
from sonde.diagnosis.ownership import recent_rates
from sonde.diagnosis.rule import Found, Threshold, above, below, by_number, fact, few, rule
from sonde.diagnosis.symptoms import NOT_FINITE, NOT_TRAINED
from sonde.diagnosis.track import Panel, Values
from sonde.records import Evidence

# Non-finite values spread through the rest of the step and into the next one.
_SPREADS_TO = ("constant_output", "dead_relu", "loss_scale_collapse")


@rule(
    "nan_in_data",
    explains=[
        *NOT_FINITE,
        "constant_output",
        "dead_relu",
        "exploding_activation",
        "exploding_gradient",
        "loss_scale_collapse",
        "lr_too_high",
    ],
    severity="critical",
    exact=True,
    fix=(
        "Check the batch with torch.isfinite(x).all() in the dataset; drop or fill missing values, and look for a "
        "division by the standard deviation of a constant feature."
    ),
    refute="Print torch.isfinite(x).all() for that batch before the model: if it is True, this finding is wrong.",
    since=0,
)
def nan_in_data(case: Case) -> Found | None:
    """A batch contains NaN or infinite values."""
    return _first_bad(
        case, "data", "An input ({key}) is not finite in step {step}: the NaN or infinity is in the data."
    )


@rule(
    "nan_in_weights",
    explains=[*NOT_FINITE[1:], *_SPREADS_TO],
    severity="critical",
    exact=True,
    fix=(
        "Look at what made the weights: the checkpoint that was loaded, or an initialisation with an infinite "
        "scale; uninitialised tensors (torch.empty) can hold anything."
    ),
    refute="Print torch.isfinite(w).all() right after the model is built: if it is True, this finding is wrong.",
    since=0,
)
def nan_in_weights(case: Case) -> Found | None:
    """A weight is not finite before the first step."""
    cause = "{name} is not finite before the first step: the initial weights or the checkpoint hold NaN or infinity."
    return _first_bad(case, "weights", cause)


@rule(
    "nan_forward",
    explains=[*NOT_FINITE[2:], *_SPREADS_TO],
    severity="critical",
    exact=True,
    fix=(
        "Look in this module for a division by 0, a log or sqrt of 0 or less, the exp of a large number, or a softmax "
        "over a fully masked row; bound the value before it."
    ),
    refute=(
        "Run the same batch with torch.autograd.set_detect_anomaly(True): if another module is named first, this "
        "finding is wrong."
    ),
    since=0,
)
def nan_forward(case: Case) -> Found | None:
    """The output of a module is the first value that is not finite."""
    cause = "The output of {name} is the first that is not finite, in step {step}; everything before it is finite."
    return _first_bad(case, "forward", cause)


@rule(
    "nan_in_loss",
    explains=[*NOT_FINITE[3:], *_SPREADS_TO],
    severity="critical",
    exact=True,
    fix=(
        "Look for log(0) in the loss, targets outside its range, or a mean over no elements; use the with_logits form "
        "of the loss, or add a small eps."
    ),
    refute=(
        "Print the model's output and the loss for that batch: if the output is not finite, this finding is wrong."
    ),
    since=0,
)
def nan_in_loss(case: Case) -> Found | None:
    """The loss is the first value that is not finite."""
    cause = "The loss is the first number that is not finite, in step {step}; the model's outputs are finite."
    return _first_bad(case, "loss", cause) or _logged(case)


def _logged(case: Case) -> Found | None:
    """Find a logged loss that has become NaN or infinite, where no recorded tensor shows why."""
    curve = case.loss()
    if curve is None or np.isfinite(curve[1][-1]) or find_origin(case) is not None:
        return None
    steps, losses = curve
    bad = ~np.isfinite(losses)
    word = "NaN" if np.isnan(losses[-1]) else "infinite"
    return Found(
        step=int(steps[bad][0]),
        sites=(signals.LOSS,),
        evidence=(above("losses that are not finite", int(bad.sum()), 1, "loss:scalar mean"),),
        cause=f"The loss is {word}, since step {int(steps[bad][0])}; no recorded tensor shows where it comes from.",
        fix="Record the model's outputs and gradients (sonde.watch does) to find the first operation that is not "
        "finite; lower the learning rate, and look for log(0) and divisions by 0 in the loss.",
        refute="Print the loss of that step: if it is finite, this finding is wrong.",
    )


@rule(
    "nan_backward",
    explains=[*NOT_FINITE[4:], *_SPREADS_TO],
    severity="critical",
    exact=True,
    fix=(
        "Look for sqrt, norm or std at exactly 0, pow below 1, or a division hidden by torch.where: their derivative "
        "is infinite there; add eps inside the root, or clip."
    ),
    refute=(
        "Run that backward pass with torch.autograd.set_detect_anomaly(True): if it reports no operation, this finding "
        "is wrong."
    ),
    since=0,
)
def nan_backward(case: Case) -> Found | None:
    """A gradient is the first value that is not finite."""
    cause = "The gradient of {name} is the first number that is not finite, in step {step}; the forward pass is finite."
    return _first_bad(case, "backward", cause)


@rule(
    "nan_in_optimizer",
    explains=_SPREADS_TO,
    severity="critical",
    exact=True,
    fix=(
        "Check the optimizer's settings: eps=0 or eps too small for the dtype, a learning rate that overflowed, or "
        "state loaded from a damaged checkpoint."
    ),
    refute="Repeat the step with plain SGD: if the weights become non-finite again, this finding is wrong.",
    since=0,
)
def nan_in_optimizer(case: Case) -> Found | None:
    """An optimizer step writes values that are not finite."""
    cause = "Step {step} of the optimizer writes non-finite numbers into {name}, though the gradients are finite."
    return _first_bad(case, "update", cause)


def _first_bad(case: Case, stage: Stage, cause: str) -> Found | None:
    """Return what was found if the first non-finite number of the run appeared in this stage of a step.

    The order of readings decides. Repeating the step gives a better answer where that was possible.
    """
    origin = find_origin(case)
    if origin is None or origin.stage != stage:
        return None
    site, step = origin.site, origin.step
    name = signals.LOSS if stage == "loss" else site.name
    harmless = stage == "data" and not _spreads(case, step)
    return Found(
        severity="info" if harmless else "critical",
        step=step,
        sites=(name, "loader") if stage == "data" else (name,),
        evidence=(
            above("numbers that are not finite", count_bad(case, site, step), 1, f"{site.key} nonfinite"),
            fact("other places of this kind in the same step", origin.others - 1),
        ),
        cause=cause.format(name=name, key=site.key, step=step),
        data={BASIS: READINGS, "stage": stage, "site": site.key},
    )


def _spreads(case: Case, step: int) -> bool:
    """Return whether a bad input reached the loss or gradients; where those are not known, outputs.

    Some models fill gaps in their input, and some passes, such as one that only finds out shapes, have no loss.
    """
    if case.learning.state == "broken":
        return True
    spread = [site for id_, at in case.history.first_bad.items() if at >= step and (site := case.site(id_)) is not None]
    if any(site.quantity in ("gradient", "update", "parameter") or site.name == signals.LOSS for site in spread):
        return True
    tracks = (case.track(site.key) for site in case.sites("gradient"))
    is_known = any(track is not None and (track.steps == step).any() for track in tracks)
    return not is_known and any(site.quantity == "output" for site in spread)


FLOAT16_NEAR_LIMIT = Threshold(0.9 * 65504, "magnitude of an output: float16 overflows above 65504")


@rule(
    "fp16_overflow",
    needs=["output"],
    explains=[*NOT_FINITE, "loss_scale_collapse"],
    exact=True,
    fix=(
        "Use bfloat16, run this layer outside autocast, or make its values smaller: average instead of summing, "
        "normalise its input."
    ),
    refute="Run the same batch in float32: if its outputs stay well below 65504, this finding is wrong.",
)
def fp16_overflow(case: Case) -> Found | None:
    """Outputs overflow float16, or come near its limit."""
    panel = case.panel("output")
    chosen = [at for at, site in enumerate(panel.sites) if site.dtype == "float16"]
    if not chosen:
        return None
    panel = panel.pick(chosen)
    largest = np.nan_to_num(statistics.abs_max(panel.rows))
    infinite = statistics.inf(panel.rows) > 0
    full = panel.read & (infinite | (largest >= FLOAT16_NEAR_LIMIT))
    if not full.any():
        return None
    at = int(np.argmax(full.any(axis=0)))
    names = [panel.names[index] for index in np.flatnonzero(full.any(axis=0))]
    over = bool(infinite.any())
    return Found(
        severity="critical" if over else "warning",
        step=int(panel.steps[full.any(axis=1)][0]),
        sites=tuple(dict.fromkeys(names)),
        evidence=(
            above("largest finite output", float(largest[:, at].max()), 0.0, f"{names[0]}:output abs_max"),
            fact("largest number in float16", 65504.0),
            fact("infinite numbers", float(panel.rows[:, at, [schema.POS_INF, schema.NEG_INF]].sum())),
        ),
        cause=f"The output of {few(names)} {'exceeds' if over else 'comes near'} 65504, the largest number in float16"
        + (", and becomes infinite." if over else "."),
        data={BASIS: READINGS},
    )


UNDERFLOW_SHARE = Threshold(0.5, "share of zeros among the gradients of a weight; the same layers have none in float32")
UNDERFLOW_STEPS = Threshold(5, "persistence: steps")
FLOAT16_SMALLEST_NORMAL = Threshold(2.0**-14, "gradient: below, float16 loses digits, and below 2**-24 everything")


@rule(
    "grad_underflow",
    needs=["gradient", "facts.autocast"],
    explains=[*NOT_TRAINED],
    fix="Use torch.amp.GradScaler, or bfloat16.",
    refute="Compute the gradients of one batch in float32: if as many are zero, this finding is wrong.",
    since=UNDERFLOW_STEPS,
)
def grad_underflow(case: Case) -> Found | None:
    """Gradients underflow to zero in float16."""
    if case.facts.scaler or case.scalar("scaler.scale") is not None:
        return None
    panel = case.panel("gradient")
    chosen = [
        at
        for at, site in enumerate(panel.sites)
        if len(site.shape) >= 2 and "Embedding" not in site.kind and "float16" in (site.dtype, case.facts.autocast)
    ]
    if not chosen:
        return None
    panel = panel.pick(chosen)
    zeros = panel.stat("zero_share")
    alive = panel.stat("abs_max") > 0
    pairs = zip(zeros.T, alive.T, strict=True)
    shares = np.array([np.median(column[ok]) if ok.sum() >= UNDERFLOW_STEPS else 0.0 for column, ok in pairs])
    shares[_are_gone(case, panel, alive)] = 1.0
    lost = [(panel.names[at], float(share)) for at, share in enumerate(shares) if share >= UNDERFLOW_SHARE]
    if not lost:
        return None
    names = [name for name, _ in lost]
    return Found(
        step=int(panel.steps[0]),
        sites=tuple(names),
        evidence=(
            above("share of gradients that are 0", lost[0][1], UNDERFLOW_SHARE, f"{names[0]}:gradient zero_share"),
            fact("smallest number in float16", 2.0**-24),
            fact("weights", len(names)),
        ),
        cause=f"Gradients of {few(names)} are computed in float16 without a gradient scaler: {lost[0][1]:.0%} of them "
        "underflow to 0.",
    )


def _are_gone(case: Case, panel: Panel, alive: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which weights never have a gradient, where those of all others are near the limit of float16.

    A dead layer has no gradient either, but those of the layers after it are as large as usual.
    """
    losses, steps = case.loss(), int(UNDERFLOW_STEPS)
    if losses is None or not (losses[1][-steps:] > 0).all() or len(panel.steps) < steps:
        return np.zeros(len(panel.sites), np.bool_)
    largest = panel.stat("abs_max")[-steps:]
    gone = np.asarray(panel.read[-steps:].all(axis=0) & ~alive[-steps:].any(axis=0), np.bool_)
    tiny = not (largest > FLOAT16_SMALLEST_NORMAL).any()
    return gone if tiny else np.zeros(len(panel.sites), np.bool_)


STALL_STEPS = Threshold(20, "persistence: steps")
STALL_SHARE = Threshold(0.75, "share of elements that a step leaves unchanged; 0.4 to 0.6 is usual in bfloat16")
STALL_DECAYED = Threshold(0.3, "rate over its highest: short steps at the end of a schedule are intended")
_COARSE = ("bfloat16", "float16")


@rule(
    "low_precision_stall",
    needs=["gradient", "update"],
    explains=[*NOT_TRAINED, "optimizer_step_noop"],
    fix=(
        "Keep the weights in float32 and use autocast for the passes, or an optimizer with float32 master weights "
        "or stochastic rounding."
    ),
    refute="Take the same step on a float32 copy: if as many elements stay unchanged, this finding is wrong.",
    since=STALL_STEPS,
)
def low_precision_stall(case: Case) -> Found | None:
    """Steps are too short for the precision of the weights: most elements round back."""
    panel = case.panel("update", last=int(STALL_STEPS))
    rates = recent_rates(case, int(STALL_STEPS))
    chosen = [
        at
        for at, site in enumerate(panel.sites)
        if site.dtype in _COARSE
        and len(site.shape) >= 2
        and "Embedding" not in site.kind
        and rates.get(site.name, 0) > 0
    ]
    if not chosen:
        return None
    panel = panel.pick(chosen)
    gradients = case.panel("gradient", last=int(STALL_STEPS))
    alive = np.any(gradients.stat("abs_max") > 0, axis=0)
    pulled = {name for at, name in enumerate(gradients.names) if alive[at]}
    zeros = np.where(panel.read, panel.stat("zero_share"), np.nan)
    known = panel.read.sum(axis=0) >= STALL_STEPS
    stuck = [
        (panel.names[at], float(np.nanmedian(zeros[:, at])))
        for at in np.flatnonzero(known)
        if np.nanmedian(zeros[:, at]) >= STALL_SHARE and panel.names[at] in pulled
    ]
    if len(stuck) * 2 < len(chosen) or not stuck:
        return None
    names = [name for name, _ in stuck]
    if _is_scheduled(case, names[0]):
        return None
    return Found(
        severity="info" if is_learning_well(case) else "warning",
        step=int(panel.steps[0]),
        sites=tuple(names),
        evidence=(
            above("share of unchanged elements", stuck[0][1], STALL_SHARE, f"{names[0]}:update zero_share"),
            above("steps in a row", STALL_STEPS, STALL_STEPS),
            fact("learning rate", rates[names[0]]),
        ),
        cause=f"Steps are too short for the precision of {few(names)}: {stuck[0][1]:.0%} of "
        f"{by_number(names, 'its', 'their')} elements round back to what they were.",
    )


def _is_scheduled(case: Case, name: str) -> bool:
    """Return whether steps are short because the schedule is just starting or ending."""
    for optimizer in case.facts.optimizers:
        for index, group in enumerate(optimizer.groups):
            curve = case.learning_rate(optimizer.name, index)
            if name in group.parameters and curve is not None:
                recent = curve[1][-int(STALL_STEPS) :]
                return bool(recent[-1] > recent[0] or recent[-1] < STALL_DECAYED * curve[1].max())
    return False


SCALE_FLOOR = Threshold(1.0, "scale: below, gradients overflow even without scaling")
SKIPPED_SHARE = Threshold(0.2, "share of skipped steps: calibration skips a few at the start and one in 2000 later")
SKIP_WINDOW = Threshold(30, "steps over which skipped ones are counted, after as many for calibration")


@rule(
    "loss_scale_collapse",
    severity="critical",
    fix=(
        "Find the layer whose gradients are not finite first (sonde show RUN --step N); use bfloat16, a smaller "
        "learning rate, or clip after scaler.unscale_(optimizer)."
    ),
    refute=(
        "Print scaler.get_scale() at every step: if it stays above 1 and steps are not skipped, this finding is wrong."
    ),
    since=5,
)
def loss_scale_collapse(case: Case) -> Found | None:
    """The gradient scaler finds no scale without overflow."""
    curve = case.scalar("scaler.scale")
    if curve is None:
        if case.facts.scaler:
            raise NotMeasured("scaler.scale")
        return None
    steps, scales = curve
    window = int(SKIP_WINDOW)
    skipped = float((case.history.skipped_steps() > case.step - window).sum()) / window
    settled = case.num_steps >= 2 * window
    if scales[-1] < SCALE_FLOOR:
        return _no_scale(steps, scales, below("scale now", scales[-1], SCALE_FLOOR, "scaler.scale:scalar mean"))
    if settled and skipped > SKIPPED_SHARE:
        return _no_scale(steps, scales, above("share of late steps that were skipped", skipped, SKIPPED_SHARE))
    return None


def _no_scale(steps: NDArray[np.int64], scales: Values, why: Evidence) -> Found:
    falls = np.flatnonzero(np.diff(scales) < 0)
    return Found(
        step=int(steps[falls[0] + 1]) if len(falls) else None,
        sites=("scaler",),
        evidence=(why, fact("scale at the start", float(scales[0])), fact("times it was lowered", len(falls))),
        cause=f"Gradients are infinite or NaN whatever the scale: it has fallen from {scales[0]:g} to {scales[-1]:g} "
        "and steps are skipped.",
    )


_LOWERED = ("Linear", "Conv1d", "Conv2d", "Conv3d")


@rule(
    "autocast_missing",
    needs=["output", "facts.autocast"],
    severity="info",
    exact=True,
    fix="Move the whole forward pass and the loss into the autocast block, unless they are left out on purpose.",
    refute="Print the dtype of their output inside the block: if it is not float32, this finding is wrong.",
    since=2,
)
def autocast_missing(case: Case) -> Found | None:
    """Layers run in float32 though autocast is on."""
    if not case.need_facts().autocast:
        return None
    layers = [site for site in case.sites("output") if site.kind in _LOWERED and site.same_as is None]
    full = [site.name for site in layers if site.dtype == "float32"]
    if not full or len(full) == len(layers):
        return None
    return Found(
        step=1,
        sites=tuple(dict.fromkeys(full)),
        evidence=(fact("layers with float32 outputs", len(set(full))), fact("layers of such classes", len(layers))),
        cause=f"Autocast to {case.facts.autocast} is on, but {few(full)} "
        + by_number(full, "returns float32: it runs outside of autocast.", "return float32: they run outside of it."),
    )
