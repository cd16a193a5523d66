"""Rules about the settings of optimizers: clipping, weight decay, eps and momentum."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sonde.core import signals, statistics
from sonde.core.facts import GroupFacts, OptimizerFacts
from sonde.diagnosis.case import Case, NotMeasured, run_length
from sonde.diagnosis.outlook import is_failing, is_learning_well
from sonde.diagnosis.ownership import held, marked
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, few, rule
from sonde.diagnosis.symptoms import NOT_FINITE, TOO_FAR
from sonde.diagnosis.tape.flow import clipped_too_late
from sonde.diagnosis.track import Panel, Track, Values
from sonde.diagnosis.weights import Weights, first_weights, last_weights
from sonde.records import Severity

APPLIED_OVER_LIMIT = Threshold(1.05, "norm over limit: clipped gradients exceed it by no more than rounding")
CLIP_STEPS = Threshold(3, "persistence: steps in which clipping came at the wrong moment")
MOST_CLIPS = Threshold(50, "calls after which clipping nothing needs no share of the steps")
CLIP_MOST = Threshold(0.8, "share of steps: nearly all that could show it")


@rule(
    "clip_after_step",
    needs=[signals.CLIP_MAX, signals.CLIP_NORM, "gradient", "facts.program"],
    explains=[*NOT_FINITE, "exploding_gradient", "lr_too_high"],
    exact=True,
    fix="Call clip_grad_norm_ between loss.backward() and optimizer.step().",
    refute=(
        "Print the norm of all gradients right before optimizer.step(): if it is never above max_norm, this finding is "
        "wrong."
    ),
    since=CLIP_STEPS + 1,
)
def clip_after_step(case: Case) -> Found | None:
    """Gradients are clipped after the step has used them, before the backward pass, or not at all."""
    if (found := _nothing_to_clip(case) or clipped_too_late(case)) is not None:
        return found
    norms = case.vitals(signals.CLIP_NORM)
    gradients = case.panel("gradient")
    if not norms or not gradients.sites:
        raise NotMeasured("optimizer:vital.clip_norm and gradients")
    if len(norms) > 1 or case.facts.scaler or len(case.facts.optimizers) > 1:
        return None
    applied = np.sqrt(np.nansum(gradients.stat("norm") ** 2, axis=1))
    by_step = dict(zip(gradients.steps.tolist(), applied.tolist(), strict=True))
    return _too_late(case, norms[0].last(32), by_step) or _too_early(case, norms[0].last(32), by_step)


def _nothing_to_clip(case: Case) -> Found | None:
    """Find clipping that was never given a parameter with a gradient."""
    for call in case.facts.calls("clip.nothing"):
        given, steps = int(call.data.get("parameters") or 0), len(set(call.steps))
        norms = case.vitals(signals.CLIP_NORM)
        often = call.count >= min(CLIP_MOST * (case.step - 1), MOST_CLIPS)
        if steps >= CLIP_STEPS and often and sum(int((track.numbers() != 0).sum()) for track in norms) <= 1:
            return Found(
                step=call.steps[0] + 1,
                sites=("optimizer", signals.LOOP),
                evidence=(above("steps that clipped nothing", steps, CLIP_STEPS), fact("parameters given", given)),
                cause=f"clip_grad_norm_(){call.place} gets "
                + (
                    "no parameter at all: a generator is used up after its first use."
                    if not given
                    else "parameters without any gradient: it comes before loss.backward(), or they are not those that "
                    "are trained."
                )
                + " Gradients are applied unclipped.",
                fix="Call clip_grad_norm_ between loss.backward() and optimizer.step()."
                if given
                else "Pass model.parameters() in each call, or keep a list: params = list(model.parameters()).",
                refute="Print what clip_grad_norm_ returns: if it is not 0, this finding is wrong.",
            )
    return None


def _too_late(case: Case, norms: Track, applied: dict[int, float]) -> Found | None:
    """Find clipping that measured the gradients that a step had applied unclipped."""
    limits = case.vital(norms.name, signals.CLIP_MAX)
    if limits is None:
        return None
    limit = float(np.median(limits.numbers()))
    same = _used_whole(norms, applied, 0) | _used_whole(norms, applied, -1)
    over = norms.numbers() > APPLIED_OVER_LIMIT * limit
    late = same & over
    # Where clipping comes first, the gradients of a step never exceed the limit.
    if late.sum() < CLIP_STEPS or late.sum() < CLIP_MOST * over.sum():
        return None
    ratio = float(np.median(norms.numbers()[late])) / limit
    return Found(
        step=int(norms.steps[late][0]),
        sites=(norms.name, signals.LOOP),
        evidence=(
            above("norm of the applied gradients over the limit", ratio, APPLIED_OVER_LIMIT, f"{norms.key} mean"),
            above("steps that applied gradients before they were clipped", int(late.sum()), CLIP_STEPS),
        ),
        cause=f"Gradients are clipped{marked(case, 'clip')} after optimizer.step() has used them: clipping has no "
        "effect.",
    )


def _too_early(case: Case, norms: Track, applied: dict[int, float]) -> Found | None:
    """Find clipping that found no gradient, in steps that had one."""
    used = np.array([applied.get(step, np.nan) for step in norms.steps.tolist()])
    early = (norms.numbers() == 0) & (used > 0)
    if early.sum() < CLIP_STEPS or early.sum() < CLIP_MOST * len(norms):
        return None
    limits = case.vital(norms.name, signals.CLIP_MAX)
    limit = float("nan") if limits is None else float(np.median(limits.numbers()))
    return Found(
        step=int(norms.steps[early][0]),
        sites=(norms.name, signals.LOOP),
        evidence=(
            below("norm of what was clipped", 0, 0, f"{norms.key} mean"),
            fact("norm of the gradients that were applied then", float(np.nanmedian(used[early]))),
            fact("norm to clip to", limit),
            above("steps like this", int(early.sum()), CLIP_STEPS),
        ),
        cause=f"Gradients are clipped{marked(case, 'clip')} before loss.backward() computes them: there is nothing to "
        "clip, and the step applies them unclipped.",
        refute="Print what clip_grad_norm_ returns: if it is not 0, this finding is wrong.",
    )


def _used_whole(norms: Track, applied: dict[int, float], shift: int) -> NDArray[np.bool_]:
    used = np.array([applied.get(step + shift, np.nan) for step in norms.steps.tolist()])
    result: NDArray[np.bool_] = np.isclose(norms.numbers(), used, rtol=1e-3)
    return result


CLIP_LOOKS = Threshold(30, "updates to judge by")
CLIPPED_SHARE = Threshold(0.5, "share of updates that are clipped; Google's tuning playbook lowers the rate above it")
CLIPPED_FACTOR = Threshold(3.0, "norm over limit: below, clipping hardly changes the length of a step")
CLIPPED_GRAVE = Threshold(10.0, "norm over limit: steps are ten times shorter than the learning rate implies")
CLIPPED_PACE = Threshold(1e-3, "update over weight of usual steps; clipped ones are shorter")


@rule(
    "clip_always_active",
    needs=[signals.CLIP_MAX, signals.CLIP_NORM, "gradient", "parameter", "update", "facts.order"],
    explains=["lr_too_low"],
    fix="Raise max_norm to about {typical:.3g} (90% of the norms are lower), or lower the learning rate instead.",
    refute="Train with the limit raised a hundredfold: if the loss does not change, this finding is wrong.",
    since=CLIP_LOOKS,
)
def clip_always_active(case: Case) -> Found | None:
    """Gradients are clipped at nearly every step."""
    norms = case.need_vitals("optimizer", signals.CLIP_NORM)
    for track in norms:
        limits = case.vital(track.name, signals.CLIP_MAX)
        found = None if limits is None else _far_above(case, track.last(100), limits.last(100))
        if found is not None:
            return found
    return None


def _far_above(case: Case, norms: Track, limits: Track) -> Found | None:
    limit = float(np.median(limits.numbers()))
    values = norms.numbers()
    if len(values) < CLIP_LOOKS or not (np.isfinite(limit) and limit > 0):
        return None
    share = float((values > limit).mean())
    factor = float(np.median(values)) / limit
    if share <= CLIPPED_SHARE or factor < CLIPPED_FACTOR:
        return None
    typical = float(np.nanquantile(values[np.isfinite(values)], 0.9)) if np.isfinite(values).any() else float("nan")
    return Found(
        severity=_severity_of_clipping(case, norms.name, factor),
        step=int(norms.steps[values > limit][0]),
        sites=(norms.name,),
        evidence=(
            above("share of the last updates that were clipped", share, CLIPPED_SHARE),
            above("median norm over the limit", factor, CLIPPED_FACTOR, f"{norms.key} mean"),
        ),
        cause=f"Gradients are clipped at almost every step: the limit of {limit:.3g} is {factor:.0f} times below the "
        "usual norm, so all steps have the same short length.",
        values={"typical": typical},
    )


def _severity_of_clipping(case: Case, name: str, factor: float) -> Severity:
    if factor >= CLIPPED_GRAVE and any(_is_outweighed(case, each) for each in case.facts.optimizers):
        return "warning"
    # Adam divides by the size of the gradient: clipping by a constant factor cancels out.
    adaptive = any(each.traits.adaptive for each in case.facts.optimizers if each.name == name)
    short = factor >= CLIPPED_GRAVE and not adaptive
    return "warning" if short and (is_failing(case) or _crawls(case)) else "info"


def _is_outweighed(case: Case, optimizer: OptimizerFacts) -> bool:
    """Return whether weight decay adds more to the gradients than clipping has left of them, and weights shrink."""
    if optimizer.traits.decoupled_decay:
        return False
    try:
        first, last = first_weights(case), last_weights(case)
    except NotMeasured:
        return False
    mine = [at for at, name in enumerate(first.names) if name in held(optimizer)]
    decay = min((_number(group, "weight_decay") for group in optimizer.groups), default=0.0)
    return decay > 0 and first.names == last.names and bool(mine) and _decides(first, last, mine, decay) > 0


def _crawls(case: Case) -> bool:
    """Return whether steps are short and the loss has not fallen far after many of them."""
    try:
        pace = last_weights(case).pace()
    except NotMeasured:
        return False
    slow = len(pace) > 0 and float(np.median(pace)) <= CLIPPED_PACE
    enough = case.learning.points >= 2 * CLIP_LOOKS
    return slow and enough and not is_learning_well(case)


@rule(
    "clip_before_unscale",
    needs=[signals.CLIP_NORM, signals.SCALED_CLIP],
    explains=["clip_always_active", "lr_too_low"],
    exact=True,
    fix="Call scaler.unscale_(optimizer) before clip_grad_norm_.",
    refute="Print what clip_grad_norm_ returns: if it does not grow with scaler.get_scale(), this finding is wrong.",
    since=CLIP_STEPS,
)
def clip_before_unscale(case: Case) -> Found | None:
    """Gradients are clipped while they are still multiplied by the loss scale."""
    tracks = case.need_vitals("optimizer", signals.SCALED_CLIP)
    for track in tracks:
        scaled = track.numbers() == 1
        if run_length(scaled) >= CLIP_STEPS:
            norms = case.vital(track.name, signals.CLIP_NORM)
            return Found(
                step=int(track.steps[scaled][0]),
                sites=(track.name,),
                evidence=(
                    above("steps in a row that clipped scaled gradients", run_length(scaled), CLIP_STEPS, track.key),
                    fact("norm that was clipped", float("nan") if norms is None else norms.numbers()[-1]),
                ),
                cause="Gradients are clipped before they are unscaled: the limit is compared with a norm that is "
                "thousands of times too large, so the step becomes thousands of times too short.",
            )
    return None


DECAY_ON_NORMS = Threshold(0.02, "weight decay above AdamW's default, so it was chosen")


@rule(
    "weight_decay_on_norm_bias",
    severity="info",
    fix="Give the optimizer two groups: matrices with weight decay, biases and norms with 0.",
    refute="Train with two groups: if the result does not change, this finding is wrong.",
    since=0,
)
def weight_decay_on_norm_bias(case: Case) -> Found | None:
    """Weight decay pulls the scales of norms towards zero."""
    case.need_facts()
    for optimizer in case.facts.optimizers:
        for group in optimizer.groups:
            decay = group.settings.get("weight_decay")
            if not isinstance(decay, int | float) or decay < DECAY_ON_NORMS:
                continue
            norms = [name for name in group.parameters if _is_norm(case, name)]
            if norms:
                return Found(
                    step=0,
                    sites=tuple(norms[:8]),
                    evidence=(
                        above("weight decay", decay, DECAY_ON_NORMS),
                        fact("parameters of norms under it", len(norms)),
                    ),
                    cause="Weight decay also pulls the scales of norms towards 0, where they should be near 1.",
                )
    return None


def _is_norm(case: Case, name: str) -> bool:
    parameter = case.parameters.get(name)
    return parameter is not None and "Norm" in parameter.kind and len(parameter.shape) == 1


DECAY_LEFT = Threshold(0.3, "size of a weight over its first size: decay in balance with gradients leaves more")
DECAY_SHARE = Threshold(0.5, "share of weights: one layer may shrink because it is not needed")
DECAY_PULL = Threshold(1.0, "what the decay adds to the gradient over what the loss adds: it decides where weights go")
PULLED_TO = Threshold(0.9, "size of a weight over its first size: the pull had an effect")
PULL_STEPS = Threshold(50, "steps: at the very end of training gradients may be as small as the decay")
DECAY_STEPS = Threshold(20, "steps in which weights shrink")


@rule(
    "weight_decay_too_large",
    needs=["gradient", "parameter", "update", "facts.order"],
    explains=[
        *TOO_FAR,
        "class_imbalance_collapse",
        "lr_schedule_collapse",
        "lr_too_high",
        "lr_too_low",
        "optimizer_step_noop",
    ],
    fix="Divide weight_decay by 100 or more; 1e-4 is usual for SGD, 0.01 for AdamW.",
    refute="Train 100 steps with weight_decay=0: if the loss does not fall either, this finding is wrong.",
    since=DECAY_STEPS,
)
def weight_decay_too_large(case: Case) -> Found | None:
    """Weight decay pulls the weights to zero faster than gradients can hold them.

    It adds more to the gradients than the loss does, or the weights have shrunk as far as it alone must shrink them.
    """
    case.need_loss()
    if is_learning_well(case):
        return None
    first, last = first_weights(case), last_weights(case)
    for optimizer in case.facts.optimizers:
        for at, group in enumerate(optimizer.groups):
            decay = _number(group, "weight_decay")
            chosen = [index for index, name in enumerate(first.names) if name in group.parameters]
            if not decay > 0 or not chosen or first.names != last.names:
                continue
            left = _left(first, last, chosen)
            pull = 0.0 if optimizer.traits.decoupled_decay else _decides(first, last, chosen, decay)
            if pull and case.num_steps >= PULL_STEPS:
                return _pulled(optimizer, decay, pull, [first.names[index] for index in chosen])
            gone = left <= DECAY_LEFT
            if gone.mean() < DECAY_SHARE or not is_failing(case):
                continue
            if _must_shrink(case, optimizer, at):
                names = [first.names[index] for index, is_gone in zip(chosen, gone.tolist(), strict=True) if is_gone]
                return _shrunk(optimizer, decay, float(np.median(left)), names)
    return None


def _number(group: GroupFacts, name: str) -> float:
    value = group.settings.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _left(first: Weights, last: Weights, chosen: list[int]) -> Values:
    """Return the size of each weight over its first size."""
    before, now = first.sizes[0, chosen], last.sizes[-1, chosen]
    result: Values = np.divide(now, before, out=np.ones(len(chosen)), where=before > 0)
    return result


def _pull(weights: Weights, chosen: list[int], decay: float) -> float:
    """Return what the decay adds to the gradients over what the loss adds, median over weights and steps."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = decay * weights.sizes[:, chosen] / weights.gradients[:, chosen]
    known = shares[~np.isnan(shares)]
    return float(np.median(known)) if len(known) else 0.0


def _decides(first: Weights, last: Weights, chosen: list[int], decay: float) -> float:
    """Return what the decay added to the gradients over what the loss did, if it decided where weights went; else 0.

    It outweighs the loss to the end, or did so until weights were so small that both balance. Where the loss never adds
    anything, as to the weights of dead units, the decay is not the reason.
    """
    pulls, left = [_pull(weights, chosen, decay) for weights in (first, last)], np.median(_left(first, last, chosen))
    settled = left <= DECAY_LEFT and pulls[0] >= DECAY_PULL
    outweighs = left <= PULLED_TO and min(pulls) >= DECAY_PULL
    return pulls[0] if (settled or outweighs) and min(pulls) < math.inf else 0.0


def _must_shrink(case: Case, optimizer: OptimizerFacts, at: int) -> bool:
    """Return whether the decay alone shrinks the weights that far within the steps so far.

    Plain descent and decoupled decay multiply a weight by 1 - rate * decay at each step, and momentum adds to that.
    """
    group = optimizer.groups[at]
    decoupled = optimizer.traits.decoupled_decay
    if optimizer.traits.adaptive and not decoupled:
        return False  # the length of its steps does not depend on the decay: only the direction does
    curve = case.learning_rate(optimizer.name, at)
    rate = _number(group, "lr") if curve is None else float(np.mean(curve[1]))
    momentum = 0.0 if decoupled else _number(group, "momentum")
    each = rate * _number(group, "weight_decay") / max(1 - momentum, 1e-3)
    return each * case.num_steps >= -math.log(DECAY_LEFT)


def _pulled(optimizer: OptimizerFacts, decay: float, pull: float, names: list[str]) -> Found:
    return Found(
        step=1,
        sites=(optimizer.name, *names[:8]),
        evidence=(
            above("what the decay adds to the gradient over what the loss adds, median", pull, DECAY_PULL),
            fact("weight decay", decay),
        ),
        cause=f"A weight decay of {decay:g} adds {pull:.2g} times as much to the gradients as the loss does: steps "
        "make weights small rather than the loss.",
    )


def _shrunk(optimizer: OptimizerFacts, decay: float, left: float, names: list[str]) -> Found:
    return Found(
        step=1,
        sites=(optimizer.name, *names[:8]),
        evidence=(
            below("size of the weights over what it was, median", left, DECAY_LEFT, f"{names[0]} rms"),
            fact("weight decay", decay),
            fact("weights that have shrunk this far", len(names)),
        ),
        cause=f"A weight decay of {decay:g} pulls weights to zero faster than gradients can hold them: {few(names)} "
        f"have {left:.0%} of their size left, and the loss does not fall.",
    )


EPS_OVER_GRADIENT = Threshold(10.0, "eps over the size of the gradient: Adam becomes plain descent at lr / eps")
EPS_USUAL = Threshold(1e-7, "eps: ten times the default, so it was chosen")
EPS_STEPS = Threshold(20, "steps over which the gradient is measured")


@rule(
    "adam_eps_too_large",
    needs=["gradient", "parameter", "update", "facts.order"],
    explains=["lr_too_low", "optimizer_step_noop"],
    fix="Use eps=1e-8, or raise the learning rate if the large eps is intended.",
    refute="Train with eps=1e-8: if the loss does not fall faster, this finding is wrong.",
    since=EPS_STEPS,
)
def adam_eps_too_large(case: Case) -> Found | None:
    """Adam's eps is many times the size of the gradients."""
    case.need_facts()
    settings = [
        group.settings for optimizer in case.facts.optimizers if optimizer.traits.adam for group in optimizer.groups
    ]
    eps = max((value for each in settings if isinstance(value := each.get("eps"), float)), default=0.0)
    if eps <= EPS_USUAL:
        return None
    weights = last_weights(case)
    sizes = weights.gradients[-int(EPS_STEPS) :]
    known = sizes[np.isfinite(sizes) & (sizes > 0)]
    ratio = eps / float(np.median(known)) if len(known) else 0.0
    if ratio < EPS_OVER_GRADIENT:
        return None
    return Found(
        severity="info" if is_learning_well(case) else "warning",
        step=int(weights.steps[0]),
        sites=("optimizer",),
        evidence=(
            above("eps over the size of a usual gradient", ratio, EPS_OVER_GRADIENT),
            fact("eps", eps),
        ),
        cause="Adam's eps is larger than the gradients: it no longer adapts, and its steps are far shorter than lr.",
    )


EPS_ROUNDS_TO_ZERO = Threshold(2.0**-25, "eps: half of float16's smallest number, below which it rounds to 0")


@rule(
    "adam_eps_too_small",
    explains=[*NOT_FINITE, "exploding_activation", "lr_too_high"],
    severity="critical",
    exact=True,
    fix="Keep the parameters in float32 and use autocast, or set eps=1e-4.",
    refute="Run one step with a gradient of zeros: if the parameters stay finite, this finding is wrong.",
    since=0,
)
def adam_eps_too_small(case: Case) -> Found | None:
    """Adam's eps rounds to zero in float16."""
    case.need_facts()
    for optimizer in case.facts.optimizers:
        for group in optimizer.groups:
            eps = group.settings.get("eps")
            halves = [name for name in group.parameters if _is_half(case, name)]
            if isinstance(eps, float) and eps < EPS_ROUNDS_TO_ZERO and halves:
                return Found(
                    step=0,
                    sites=(optimizer.name, *halves[:4]),
                    evidence=(
                        below("eps", eps, EPS_ROUNDS_TO_ZERO),
                        fact("parameters in float16", len(halves)),
                    ),
                    cause=f"{optimizer.kind} computes in float16, where eps={eps:g} rounds to 0: for a gradient of 0 "
                    "it "
                    "divides 0 by 0.",
                )
    return None


def _is_half(case: Case, name: str) -> bool:
    parameter = case.parameters.get(name)
    return parameter is not None and parameter.dtype.endswith("float16") and not parameter.dtype.endswith("bfloat16")


@rule(
    "momentum_never_filled",
    needs=["gradient", "parameter"],
    explains=[*TOO_FAR, "lr_too_high"],
    severity="critical",
    exact=True,
    fix=(
        "Remove fused=True for SGD with momentum, or start with a scale that does not overflow, such as "
        "GradScaler(init_scale=1024)."
    ),
    refute="Set fused=False: if step {step} still makes the weights non-finite, this finding is wrong.",
    since=2,
)
def momentum_never_filled(case: Case) -> Found | None:
    """A fused SGD used uninitialised momentum, because the scaler skipped its first step.

    Its first step made weights non-finite with finite gradients.
    """
    fused = [each for each in case.need_facts().optimizers if each.traits.late_momentum]
    if not fused:
        raise NotMeasured("a fused SGD with momentum")
    return next((found for each in fused if (found := _spoilt(case, each)) is not None), None)


def _spoilt(case: Case, optimizer: OptimizerFacts) -> Found | None:
    flag = case.track(f"{optimizer.name}.found_inf:scalar")
    if flag is None or case.history.first_step not in (0, 1) or int(flag.steps[0]) != 1:
        return None
    taken = np.flatnonzero(flag.numbers() == 0)
    if not len(taken) or taken[0] == 0:
        return None
    skipped, step = int(taken[0]), int(flag.steps[taken[0]])
    mine = set(held(optimizer))
    gradients, parameters = (_bad(case.first_panel(quantity), step) for quantity in ("gradient", "parameter"))
    bad = [name for name in parameters if name in mine]
    if not bad or any(name in mine for name in gradients):
        return None
    return Found(
        step=step,
        sites=(optimizer.name, *bad[:4]),
        evidence=(
            fact("steps that were skipped before the first", skipped, f"{flag.key} mean"),
            fact("parameters that became non-finite with finite gradients", len(bad)),
        ),
        cause=f"{optimizer.name} is a fused SGD whose first step was skipped by the gradient scaler. Torch allocates "
        "its "
        f"momentum then but fills it only in a step that is taken: step {step} added uninitialised memory.",
        values={"step": step},
    )


def _bad(panel: Panel, step: int) -> list[str]:
    """Return the names of sites that are not finite in a step."""
    at = np.flatnonzero(panel.steps == step)
    if not len(at):
        return []
    bad = statistics.nonfinite(panel.rows[at[0]]) > 0
    return [name for name, is_bad in zip(panel.names, bad, strict=True) if is_bad]
