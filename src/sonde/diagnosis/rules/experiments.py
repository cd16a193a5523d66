"""Rules about experiments on a taped step: which change made it learn, what the loss rewards, what leaks.

The experiments measure (`sonde.forensics.experiments`); here is decided what a measurement means. An opinion confirms
or refutes a kind that another theme looks for, and reports it by itself if the experiment suffices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from sonde.core import signals
from sonde.core.examination import Result
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Found, Refuted, Threshold, above, below, fact, few, opinion, rule
from sonde.diagnosis.rules.rates import JUMP_FAR
from sonde.diagnosis.symptoms import NOT_TRAINED
from sonde.diagnosis.tape.flow import unused_twin
from sonde.diagnosis.tape.unused import ignored_argument, read_too_early

# ---------------------------------------------------------------- which change turns failing into learning

FAILS = Threshold(0.1, "share of the way from a guess to the lowest loss: of a fit that has learnt next to nothing")
LEARNS = Threshold(0.3, "share of that way: a third of what there is to learn from a batch, in at most 100 steps")
FIRST_STEPS = Threshold(5, "steps after which weights are no longer what they began with")
BETTER = Threshold(0.2, "share of that way by which a change must be better to matter")

INPUTS, TARGETS, WEIGHTS = "standardised inputs", "standardised targets", "default initialisation"
NO_DECAY, NO_CLIP, NO_DROPOUT, MOMENTUM = "no weight decay", "no clipping", "no dropout", "momentum 0.9"
EPS, RATE = "eps 1e-8", "learning rate x "
_CAUSES = (INPUTS, TARGETS, NO_DECAY, NO_CLIP, NO_DROPOUT, MOMENTUM, EPS, WEIGHTS)
"""Changes, the most specific first. Another learning rate makes up for many faults, and is blamed last."""


@dataclass(frozen=True, slots=True)
class Fits:
    """The fits of one taped batch: how they ended, as it was trained and with one thing changed."""

    step: int
    result: Result

    def skill(self, name: str = "as is") -> float | None:
        """Return how much a fit has learnt, from 0 to 1; None if it was not made."""
        return self.result.number(f"skill.{name}")

    @property
    def fails(self) -> bool:
        """Whether the batch is not learnt as it is trained."""
        own = self.skill()
        return own is not None and own < FAILS

    @property
    def fails_anew(self) -> bool:
        """Whether the batch is not learnt from new weights either, which are then what all changes begin with."""
        anew = self.skill(WEIGHTS)
        return self.fails and anew is not None and anew < FAILS

    @property
    def learns(self) -> bool:
        """Whether the batch is learnt as it is trained."""
        own = self.skill()
        return own is not None and own >= LEARNS

    def learnt_with(self) -> list[str]:
        """Return the changes with which the batch is learnt, the most specific first; rates nearest first."""
        skills = self.result.part("skill")
        rates = sorted((name for name in skills if name.startswith(RATE)), key=lambda name: abs(_log_factor(name)))
        order = [*_CAUSES, *rates]
        return [name for name in order if skills.get(name, 0.0) >= LEARNS]

    def words(self, name: str) -> str:
        """Describe what a change did, with numbers."""
        base = "as is" if name == WEIGHTS else WEIGHTS
        own, other = self.result.number(f"end.{base}"), self.result.number(f"end.{name}")
        steps = self.result.number(f"steps_to_learn.{name}")
        within = "" if steps is None else f" (halfway after {steps:.0f} steps)"
        how = f"{self.result.number('steps') or 0:.0f} steps on the batch of step {self.step}"
        anew = "" if name == WEIGHTS else " from new weights"
        return f"After {how}{anew} the loss is {own:.4g} as it is trained, and {other:.4g} with {name}{within}."


def _log_factor(name: str) -> float:
    mantissa, _, exponent = f"{float(name.removeprefix(RATE)):e}".partition("e")
    return float(exponent) + (0.5 if float(mantissa) > 2 else 0.0)


def fits(case: Case) -> list[Fits]:
    """Return the fits of all taped batches that can be rated."""
    return [Fits(step, result) for step, result in case.results("learnability")]


def _turned(case: Case, wanted: str, *, first_only: bool = False) -> Fits | None:
    """Return the fits of a batch that fails and is learnt with one kind of change as the most specific.

    Only in a run whose loss does not fall: in a healthy one a batch may just need more steps.
    """
    if not case.learning.failed:
        return None
    for each in fits(case)[: 1 if first_only else None]:
        learnt = each.learnt_with() if each.fails and (wanted == WEIGHTS or each.fails_anew) else []
        if learnt and learnt[0].startswith(wanted):
            return each
    return None


def _tried(each: Fits, name: str, cause: str, fix: str, sites: tuple[str, ...]) -> Found:
    skill = each.skill(name)
    return Found(
        severity="warning",
        step=each.step,
        sites=sites,
        evidence=(
            below("share of the batch learnt as it is trained", each.skill() or 0.0, FAILS),
            above(f"share learnt with {name}", skill or 0.0, LEARNS),
        ),
        cause=f"{cause} {each.words(name)}",
        fix=fix,
        experiment=each.words(name),
    )


def _no_better(case: Case, *names: str, by: Threshold = BETTER) -> Refuted | None:
    """Return a refutation if all taped batches fail, a change was tried on each, and made nothing better.

    A batch that is learnt as it is trained refutes nothing: a fault may make learning slow, or act later.
    """
    reasons = []
    for each in fits(case):
        known = [(skill, name) for name in names if (skill := each.skill(name)) is not None]
        own = each.skill("as is" if names == (WEIGHTS,) else WEIGHTS)
        if own is None or not known or not each.fails or (names != (WEIGHTS,) and not each.fails_anew):
            return None
        if max(known)[0] >= own + by:
            return None
        reasons.append(each.words(max(known)[1]))
    return Refuted(" ".join(reasons)) if reasons else None


def _setting(each: Fits, name: str) -> float | None:
    text = each.result.words.get(name)
    return None if text is None else float(text)


def _changed_line(each: Fits, name: str, value: float) -> str:
    """Return the line that makes the optimizer with one setting changed, if it is known."""
    line = each.result.words.get("optimizer_line", "")
    changed, count = re.subn(rf"\b{name}\s*=\s*[^,)]+", f"{name}={value:g}", line)
    return f" In {changed}" if count == 1 else ""


def _rates(each: Fits, *, higher: bool) -> list[str]:
    names = [name for name in each.result.part("skill") if name.startswith(RATE)]
    return [name for name in names if (float(name.removeprefix(RATE)) > 1) == higher]


def _another_rate(case: Case, *, higher: bool) -> tuple[Fits, str, float] | None:
    each = _turned(case, RATE)
    if each is None:
        return None
    name = each.learnt_with()[0]
    factor = float(name.removeprefix(RATE))
    return (each, name, factor) if (factor > 1) == higher else None


@opinion("lr_too_high")
def lr_too_high(case: Case) -> Found | Refuted | None:
    """A batch that is not learnt is learnt with a lower rate, or less momentum, and with nothing else."""
    found = _another_rate(case, higher=False)
    if found is not None:
        each, name, factor = found
        rate = _setting(each, "rate")
        new = "a rate" if rate is None else f"lr={rate * factor:.1g}"
        line = "" if rate is None else _changed_line(each, "lr", float(f"{rate * factor:.1g}"))
        return _tried(
            each, name, "Steps are too long.", f"Use {new}, {1 / factor:g} times lower.{line}", ("optimizer",)
        )
    slower = _turned(case, MOMENTUM)
    if slower is not None:
        line = _changed_line(slower, "momentum", 0.9)
        return _tried(
            slower, MOMENTUM, "Momentum makes steps far too long.", f"Use momentum=0.9.{line}", ("optimizer",)
        )
    names = {name for each in fits(case) for name in _rates(each, higher=False)}
    # Lower rates take more steps: that they learn anything where the rate itself learns nothing is no refutation.
    return _no_better(case, *names, by=FAILS) or (None if _has_jumped(case) else _shorter_than_best(case))


def _has_jumped(case: Case) -> bool:
    """Return whether the loss was far above its start at some time: then a step that was not was not like all."""
    found = case.loss()
    return found is not None and bool(np.nanmax(found[1]) >= JUMP_FAR * abs(found[1][0]))


STILL_SHORT = Threshold(
    3.0, "times its length at which an update lowers the loss of its batch most: it stops well short"
)


def _shorter_than_best(case: Case) -> Refuted | None:
    """Return a refutation if every update lowers the loss of its own batch, and a longer one would lower it more."""
    found = [(step, result) for step, result in case.results("descent") if result.number("best_factor") is not None]
    for _, result in found:
        before, after = result.number("start"), result.number("loss.1")
        if before is None or after is None or after >= before or (result.number("best_factor") or 0) < STILL_SHORT:
            return None
    if not found:
        return None
    step, result = found[-1]
    return Refuted(
        f"The update of step {step} takes the loss of its batch from {result.number('start'):.4g} to "
        f"{result.number('loss.1'):.4g}, and {result.number('best_factor'):g} times as long it would be lowest."
    )


@opinion("lr_too_low")
def lr_too_low(case: Case) -> Found | Refuted | None:
    """A batch that is not learnt is learnt with a higher rate, and with nothing else."""
    found = _another_rate(case, higher=True)
    if found is not None:
        each, name, factor = found
        rate = _setting(each, "rate")
        new = "a rate" if rate is None else f"lr={rate * factor:.1g}"
        line = "" if rate is None else _changed_line(each, "lr", float(f"{rate * factor:.1g}"))
        return _tried(each, name, "Steps are too short.", f"Use {new}, {factor:g} times higher.{line}", ("optimizer",))
    return _no_better(case, *{name for each in fits(case) for name in _rates(each, higher=True)})


@opinion("unnormalised_inputs")
def unnormalised_inputs(case: Case) -> Found | Refuted | None:
    """A batch that is not learnt is learnt with standardised inputs."""
    each = _turned(case, INPUTS)
    if each is None:
        return _no_better(case, INPUTS)
    fix = "Standardise the inputs: subtract the mean of each feature over the training set, divide by its spread."
    return _tried(each, INPUTS, "The scale of the inputs keeps the model from learning.", fix, ("(data)",))


@opinion("target_scale")
def target_scale(case: Case) -> Found | Refuted | None:
    """A batch that is not learnt is learnt with standardised targets."""
    each = _turned(case, TARGETS)
    if each is None:
        return _no_better(case, TARGETS)
    fix = "Standardise the targets over the training set, and undo it on predictions."
    return _tried(
        each, TARGETS, "The scale of the targets keeps the model from learning.", fix, (signals.LOSS, "(data)")
    )


@opinion("weight_decay_too_large")
def weight_decay_too_large(case: Case) -> Found | Refuted | None:
    """A batch that is not learnt is learnt without weight decay."""
    each = _turned(case, NO_DECAY)
    if each is None:
        return _no_better(case, NO_DECAY)
    line = _changed_line(each, "weight_decay", 0.01)
    return _tried(
        each, NO_DECAY, "Weight decay undoes what is learnt.", f"Use weight_decay=0.01.{line}", ("optimizer",)
    )


@opinion("clip_always_active")
def clip_always_active(case: Case) -> Found | Refuted | None:
    """A batch that is not learnt is learnt without clipping."""
    each = _turned(case, NO_CLIP)
    if each is None:
        return None
    fix = "Raise the limit of the clipping above the usual norm of the gradient."
    return _tried(each, NO_CLIP, "Clipping leaves too little of the gradient.", fix, ("optimizer", "(loop)"))


@opinion("dropout_too_high")
def dropout_too_high(case: Case) -> Found | Refuted | None:
    """A batch that is not learnt is learnt without dropout."""
    each = _turned(case, NO_DROPOUT)
    if each is None:
        return _no_better(case, NO_DROPOUT)
    modules = tuple(module.name for module in case.facts.modules if "Dropout" in module.kind)
    fix = "Lower the probability of dropout; 0.1 to 0.5 is common."
    return _tried(each, NO_DROPOUT, "Dropout removes too much.", fix, modules)


@opinion("adam_eps_too_large")
def adam_eps_too_large(case: Case) -> Found | Refuted | None:
    """A batch that is not learnt is learnt with the usual eps."""
    each = _turned(case, EPS)
    if each is None:
        return None
    return _tried(
        each, EPS, "eps outweighs the gradients.", f"Use eps=1e-8.{_changed_line(each, 'eps', 1e-8)}", ("optimizer",)
    )


@opinion("bad_init_scale")
def bad_init_scale(case: Case) -> Found | Refuted | None:
    """The first batch is not learnt, but is with weights drawn as torch's layers draw them."""
    each = _turned(case, WEIGHTS, first_only=True)
    if each is None or each.step > FIRST_STEPS:
        return _no_better(case, WEIGHTS)
    odd = tuple(filter(None, each.result.words.get("odd_weights", "").split(", ")))
    fix = "Leave the weights as torch's layers draw them, or scale yours like that."
    where = f" The scale of {few(odd)} is unusual." if odd else ""
    return _tried(each, WEIGHTS, f"The initial weights keep the model from learning.{where}", fix, odd)


# ---------------------------------------------------------------- what the loss asks for

HELD_BACK = Threshold(0.25, "share of the loss that an activation before the loss makes impossible to remove")
MATTERS = Threshold(1e-3, "of the loss: what the search for the lowest loss may leave")
A_GUESS = Threshold(0.99, "lowest loss over that of one answer for all samples: the same but for the search")
DISAGREES = Threshold(0.5, "correlation of the best outputs with the targets: of a loss that asks for something else")
_NORMALISES = frozenset({"linalg_vector_norm", "norm", "native_layer_norm"})
_LIMITS = {"_softmax": "softmax", "softmax": "softmax", "sigmoid": "sigmoid", "sigmoid_": "sigmoid",
           "hardsigmoid": "sigmoid", "relu": "relu", "relu_": "relu", "clamp_min": "relu", "tanh": "tanh",
           "tanh_": "tanh", "hardtanh": "tanh", "hardtanh_": "tanh", "clamp": "clamp", "softplus": "softplus",
           "elu": "elu", "exp": "exp", "abs": "abs"}  # fmt: skip
_OF_CLASSES = ("cross_entropy", "nll_loss")


def _held_back(case: Case) -> tuple[int, Result, str, Found] | None:
    """Return what an activation between the last layer and the loss makes impossible, if that is much."""
    for step, result in case.results("free_outputs"):
        best, bound, start = (result.number(name) for name in ("loss_inputs.lowest", "scores.lowest", "start"))
        if best is None or bound is None or start is None or result.number("loss_inputs.unbounded"):
            continue
        between = result.words.get("between", "").split()
        limits = [_LIMITS[each] for each in between if each in _LIMITS]
        share = (bound - best) / max(start - best, 1e-12)
        if not limits or _NORMALISES & set(between) or share < HELD_BACK or bound - best < MATTERS * abs(start):
            continue
        line = result.words.get("line", "")
        cause = (
            f"Whatever the last layer computes, the loss cannot fall below {bound:.4g}; without the {limits[-1]} "
            f"before the loss it could reach {best:.2g}."
        )
        found = Found(
            severity="critical",
            step=1,
            sites=tuple(filter(None, (result.words.get("module", ""), signals.LOSS))),
            evidence=(
                above("share of the loss that cannot be removed", share, HELD_BACK),
                fact("lowest loss that outputs of the last layer can reach", bound),
                fact("lowest loss without what lies between", best),
            ),
            cause=cause,
            fix=f"Remove the {limits[-1]} before the loss" + (f" ({line})." if line else "."),
            experiment=f"With a free last layer the loss falls from {start:.4g} to {bound:.4g} and no lower.",
        )
        return step, result, limits[-1], found
    return None


@opinion("double_softmax", exact=True)
def double_softmax(case: Case) -> Found | None:
    """A softmax before a loss of classes keeps the loss from falling."""
    held = _held_back(case)
    return held[3] if held is not None and held[2] == "softmax" and held[1].words.get("loss") in _OF_CLASSES else None


@opinion("double_sigmoid", exact=True)
def double_sigmoid(case: Case) -> Found | None:
    """A sigmoid before a loss that has its own keeps the loss from falling."""
    held = _held_back(case)
    own = ("binary_cross_entropy_with_logits", *_OF_CLASSES)
    return held[3] if held is not None and held[2] == "sigmoid" and held[1].words.get("loss") in own else None


@opinion("output_range_mismatch", exact=True)
def output_range_mismatch(case: Case) -> Found | None:
    """An activation at the end cannot reach the targets."""
    held = _held_back(case)
    if held is None or held[1].words.get("loss") in ("binary_cross_entropy_with_logits", *_OF_CLASSES):
        return None
    return held[3]


@opinion("loss_sign_flipped", exact=True)
def loss_sign_flipped(case: Case) -> Found | None:
    """The lower the loss, the worse the outputs match the targets."""
    if len(case.facts.optimizers) > 1:
        return None
    for _, result in case.results("free_outputs"):
        for cut in ("scores", "outputs"):
            before, after = (result.number(f"{cut}.agreement_{when}") for when in ("before", "after"))
            lowest, start = result.number(f"{cut}.lowest"), result.number("start")
            if (
                before is None
                or after is None
                or not result.number(f"{cut}.unbounded")
                or result.number("guess") is not None
            ):
                continue
            kind = result.words.get("agreement", "agreement")
            against = after <= 0.0 if kind == "accuracy" else after < -DISAGREES
            if against and after < before:
                return Found(
                    severity="critical",
                    step=1,
                    sites=(signals.LOSS,),
                    evidence=(
                        fact(f"{kind} of the outputs that the loss asks for", after),
                        fact(f"{kind} now", before),
                    ),
                    cause=f"The loss has no bottom, and falls as outputs move away from the targets: outputs that "
                    f"minimise it have {'an' if kind == 'accuracy' else 'a'} {kind} of {after:.2g}.",
                    experiment=f"With free outputs the loss falls from {start:.4g} to {lowest:.2g} and on, and their "
                    f"{kind} from {before:.2g} to {after:.2g}.",
                )
    return None


@opinion("broadcast_loss", exact=True)
def broadcast_loss(case: Case) -> Found | None:
    """Outputs that minimise the loss do not match the targets, which have another shape."""
    for _, result in case.results("free_outputs"):
        after, unbounded = result.number("outputs.agreement_after"), result.number("outputs.unbounded")
        shapes = result.words.get("shapes", "")
        if after is None or unbounded or result.words.get("agreement") != "correlation" or not shapes:
            continue
        lowest, guess = result.number("outputs.lowest"), result.number("guess")
        is_guess = guess is not None and lowest is not None and lowest > A_GUESS * guess
        if after < DISAGREES and is_guess:
            return Found(
                severity="critical",
                step=1,
                sites=(signals.LOSS,),
                evidence=(below("correlation of the best outputs with the targets", after, DISAGREES),),
                cause=f"Every output is compared with every target ({shapes}): the lowest loss, {lowest:.4g}, is that "
                "of one answer for all samples.",
                experiment=f"With free outputs the loss falls to {lowest:.4g} and no lower.",
            )
    return None


# ---------------------------------------------------------------- whether targets belong to their samples

RISE = Threshold(6.0, "rise of the loss over its scatter when targets are permuted: not by chance")
PERMUTED_STEP = Threshold(20, "steps: a model that has taken fewer knows nothing of its targets yet")


@opinion("not_learning")
def not_learning(case: Case) -> Found | Refuted | None:
    """The loss depends on which target belongs to which sample, so something has been learnt, though the loss stays."""
    known = [each for each in case.results("information") if each[0] >= PERMUTED_STEP]
    if not known:
        return None
    step, result = known[-1]
    start, mean, rise = (result.number(name) for name in ("start", "permuted", "rise"))
    if start is None or mean is None or rise is None or rise < RISE:
        return None
    return Refuted(
        f"With its targets permuted, the loss of the batch of step {step} rises from {start:.4g} to {mean:.4g}, "
        f"{rise:.0f} times its scatter: the model has learnt which target belongs to which sample."
    )


# ---------------------------------------------------------------- what depends on what

MOVED = Threshold(1e-6, "change of an output in float64, relative: rounding is below 1e-12")


@opinion("graph_break_detach", exact=True)
def graph_break_detach(case: Case) -> Found | None:
    """Parameters change the loss, and no gradient reaches them.

    Not judged with several optimizers: one may step on a loss that is cut off from what another trains. Parameters that
    had a gradient in the training itself are not cut off: a repetition that gives them none, as that of a checkpointed
    part whose forward runs twice, shows nothing.
    """
    if len(case.facts.optimizers) > 1:
        return None
    for step, result in case.results("descent"):
        listed = filter(None, result.words.get("without_gradient", "").split(", "))
        names = tuple(name for name in listed if not _had_gradient(case, name))
        count = result.number("without_gradient") or 0
        if names:
            return Found(
                step=step,
                sites=names,
                evidence=(above("parameters with an effect on the loss and no gradient", count, 1),),
                cause=f"{few(names)} change the loss, but get no gradient: the graph is cut behind them.",
                fix=f"Look behind {names[-1].rpartition('.')[0] or names[-1]} for .detach(), .data, .item(), argmax, "
                "rounding or torch.no_grad(), and remove it.",
                experiment=f"A small change of {names[0]} changes the loss, and its gradient is zero.",
            )
    return None


def _had_gradient(case: Case, name: str) -> bool:
    track = case.track(f"{name}:gradient")
    return track is not None and bool((track.stat("abs_max") > 0).any())


@opinion("batch_axis_mixed")
def batch_axis_mixed(case: Case) -> Found | None:
    """The output of a sample depends on the other samples of its batch, in evaluation mode."""
    for step, result in case.results("dependence"):
        moved = result.number("other_samples")
        if moved is None or moved < MOVED or result.number("relates_samples"):
            continue
        return Found(
            severity="warning",
            step=step,
            sites=("(model)",),
            evidence=(above("change of other outputs over that of the sample itself", moved, MOVED),),
            cause="The output of a sample depends on the other samples of its batch, also in evaluation mode.",
            fix="Look for a norm, a softmax, a mean, a view or attention over dimension 0; check batch_first.",
            experiment=f"Changing one sample changes the outputs of others by {moved:.1e} of its own change.",
        )
    return None


@opinion("future_leak", exact=True)
def future_leak(case: Case) -> Found | None:
    """The output at a position depends on the input that is its target."""
    for step, result in case.results("dependence"):
        moved, shift = result.number("future"), result.number("shift")
        if moved is None or shift is None or moved < MOVED:
            continue
        return Found(
            severity="critical",
            step=step,
            sites=("(model)",),
            evidence=(above("change of an output with the input that is its target", moved, MOVED),),
            cause=f"The target at each position is the input {shift:.0f} later, and the output depends on that input.",
            experiment=f"Changing the input {shift:.0f} position(s) later changes the output.",
        )
    return None


@opinion("constant_output", exact=True)
def constant_output(case: Case) -> Found | None:
    """No input of the model has any effect on its outputs."""
    for step, result in case.results("dependence"):
        inputs, ignored = result.number("inputs"), result.number("ignored")
        if inputs and inputs == ignored:
            return Found(
                severity="critical",
                step=step,
                sites=("(model)",),
                evidence=(fact("inputs that change no output", ignored),),
                cause=f"No output depends on what the model is called with ({result.words.get('ignored', '')}).",
                fix="Look in forward for an input that is overwritten, multiplied by zero or not used.",
                experiment="Giving every sample the inputs of another changes no output.",
            )
    return None


@rule(
    "input_ignored",
    explains=[*NOT_TRAINED, "constant_output", "target_scale"],
    severity="info",
    fix="Use it in forward, or do not pass it.",
    refute="Change it by hand before the call: if an output changes, this finding is wrong.",
)
def input_ignored(case: Case) -> Found | None:
    """The model is called with data that changes none of its outputs.

    A warning where the loss does not fall; else it may be there for another use.
    """
    if (taped := read_too_early(case) or unused_twin(case) or ignored_argument(case)) is not None:
        return taped
    for step, result in case.results("dependence"):
        order = result.number("order")
        if order is not None and order <= MOVED and case.learning.failed:
            return Found(
                severity="warning",
                step=step,
                sites=("(model)",),
                evidence=(below("relative change of the outputs when the tokens are reversed", order, MOVED),),
                cause="The model cannot see the order of its tokens: reversed, they give the same outputs. Attention "
                "by itself does not know positions.",
                fix="Add position embeddings or encodings to the embedded tokens.",
                refute="Reverse the tokens of a batch in eval mode: if the outputs change, this finding is wrong.",
                experiment="Reversing the tokens of every sample changes no output.",
            )
        inputs, ignored = result.number("inputs") or 0, result.number("ignored") or 0
        if 0 < ignored < inputs:
            names = result.words.get("ignored", "an input")
            return Found(
                severity="warning" if case.learning.failed else "info",
                step=step,
                sites=("(model)",),
                evidence=(fact("inputs that change no output", ignored), fact("inputs", inputs)),
                cause=f"{names} differs between samples, but changes no output of the model.",
                experiment=f"Giving every sample another sample's {names} changes no output.",
            )
    return None
