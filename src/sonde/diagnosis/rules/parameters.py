"""Rules about parameters: which optimizer holds them, and whether the backward pass reaches them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde import vitals
from sonde.core import statistics
from sonde.diagnosis.case import Case
from sonde.diagnosis.fresh import fresh_parameters
from sonde.diagnosis.ownership import (
    held,
    module_of,
    need_optimizers,
    output_module,
    own_steps,
    ran,
    runner_of,
    share_of,
    size,
)
from sonde.diagnosis.rule import Found, Threshold, above, by_number, fact, few, rule
from sonde.diagnosis.rules.loop import DOUBLE_STEPS
from sonde.diagnosis.symptoms import NOT_TRAINED
from sonde.records import Evidence, Severity


@dataclass(frozen=True, slots=True)
class Unreached:
    """Trainable, owned parameters that never had a gradient, and the modules of which some parameter had one."""

    names: tuple[str, ...]
    steps: dict[str, int]
    """By parameter: in how many of the last steps its optimizer stepped."""
    live: frozenset[str]
    """Modules with a parameter of their own, or below them, that had a gradient."""
    first_step: int

    def has_live_kin(self, case: Case, name: str) -> bool:
        """Say whether another parameter of the same module had a gradient: then the module is not cut off."""
        return runner_of(case, name) in self.live


def unreached(case: Case) -> Unreached:
    """Return what the backward pass never reached.

    Raises:
        NotMeasured: Optimizers or updates are not known.

    """
    return case.once("unreached", lambda: _find(case))


def _find(case: Case) -> Unreached:
    steps = own_steps(case)
    reached = {site.name for site in case.sites("gradient")}
    names = []
    for optimizer in need_optimizers(case):
        mine = [name for name in held(optimizer) if name in case.parameters and case.parameters[name].trainable]
        # If none at all has a gradient though backward passes reached them, the loop is at fault and not the graph.
        if any(name in reached for name in mine) or _is_never_reached(case, optimizer.name):
            names += [name for name in mine if name not in reached and steps.get(name, 0) > 0]
    live: set[str] = set()
    for name in reached:
        module = runner_of(case, name)
        while module not in live:
            live.add(module)
            module = module.rpartition(".")[0] or "(model)"
    first = int(case.history.first_step or 0)
    return Unreached(tuple(dict.fromkeys(names)), steps, frozenset(live), max(first, 1))


def _is_never_reached(case: Case, optimizer: str) -> bool:
    backwards = case.vital(optimizer, vitals.BACKWARDS_SEEN)
    return backwards is not None and not backwards.numbers().any()


ORPHAN_STEPS = Threshold(2, "persistence: a gradient that nobody applies, in two steps")


@rule(
    "params_not_in_optimizer",
    needs=["gradient", "parameter", "facts.hidden"],
    explains=[*NOT_TRAINED],
    exact=True,
    fix=(
        "Build the optimizer after the model is complete, from model.parameters(), or add them with "
        "optimizer.add_param_group(...). If they are meant to stay as they are, call requires_grad_(False) on them."
    ),
    refute="Compare one of them before and after optimizer.step(): a change refutes it.",
    since=2,
)
def params_not_in_optimizer(case: Case) -> Found | None:
    """Parameters get gradients that no optimizer applies.

    Find trainable parameters with gradients whose values nobody changes.
    """
    need_optimizers(case)
    if case.facts.hidden:
        tensors = [each.name for each in case.facts.hidden if each.tensor]
        return _no_parameters(case, tensors) if len(tensors) == len(case.facts.hidden) else _out_of_sight(case)
    panel = case.panel("gradient")
    alive = (panel.read & (statistics.norm(panel.rows) > 0)).sum(axis=0)
    counts = dict(zip(panel.names, alive.tolist(), strict=True))
    orphans = [
        name
        for name, each in case.parameters.items()
        if each.trainable and not each.owners and counts.get(name, 0) >= ORPHAN_STEPS
    ]
    orphans = [name for name in orphans if not _is_changed(case, name)]
    if not orphans:
        return None
    last = case.track(f"{orphans[0]}:gradient")
    share = share_of(case, orphans)
    head = output_module(case)
    severity: Severity = "critical" if any(module_of(name) == head for name in orphans) else "warning"
    return Found(
        severity=severity,
        step=int(last.steps[0]) if last is not None else None,
        sites=tuple(orphans),
        evidence=(
            above("steps in which they got a gradient", max(counts[name] for name in orphans), ORPHAN_STEPS),
            fact("parameters that no optimizer holds", len(orphans)),
            fact("their share of all trainable elements", share),
        ),
        cause=f"{few(orphans)} "
        + by_number(
            orphans,
            "gets gradients, but no optimizer holds it: it never changes.",
            "get gradients, but no optimizer holds them: they never change.",
        ),
    )


def _no_parameters(case: Case, names: list[str]) -> Found:
    return Found(
        severity="warning",
        step=1,
        sites=tuple(names),
        evidence=(fact("plain tensors of modules that get gradients and never change", len(names)),),
        cause=f"{few(names)} {by_number(names, 'is a plain tensor', 'are plain tensors')} with requires_grad, not "
        f"nn.Parameter: {by_number(names, 'it gets', 'they get')} gradients, but model.parameters() does not list "
        f"{by_number(names, 'it', 'them')}, so no optimizer moves {by_number(names, 'it', 'them')}.",
        fix="Write nn.Parameter(...) around what is to be learnt, and build the optimizer after that; what is to stay "
        "as it is goes to register_buffer.",
    )


def _out_of_sight(case: Case) -> Found:
    names = [each.name for each in case.facts.hidden]
    keeper = names[0].split(".")[0]
    return Found(
        severity="critical",
        step=1,
        sites=tuple(names),
        evidence=(fact("parameters that get gradients, but that model.parameters() does not list", len(names)),),
        cause=f"{few(names)} {by_number(names, 'stands', 'stand')} in a plain list or dict ({keeper}), which torch "
        f"does not look into: {by_number(names, 'it gets', 'they get')} gradients, but no optimizer has "
        f"{by_number(names, 'it', 'them')}, nor has state_dict().",
        fix="Use nn.ModuleList, nn.ModuleDict or nn.ParameterList instead of the plain list or dict, and build the "
        "optimizer after that.",
        refute="Print len(list(model.parameters())): if these are counted, it is wrong.",
    )


def _is_changed(case: Case, name: str) -> bool:
    """Say whether a parameter was written to after the run began: then somebody trains it whom we do not know."""
    track = case.track(f"{name}:parameter")
    return track is not None and len(track) > 1 and bool(np.any(np.diff(track.rows, axis=0) != 0))


@rule(
    "stale_params_in_optimizer",
    explains=[*NOT_TRAINED, "params_not_in_optimizer", "step_not_called"],
    exact=True,
    fix=(
        "Make the optimizer after the last change to the model: after replacing layers, loading, copying, "
        ".to(...) or wrapping it."
    ),
    refute=(
        "If {{id(p) for g in optimizer.param_groups for p in g['params']}} has the id of every parameter of "
        "the model, it is wrong."
    ),
    since=1,
)
def stale_params_in_optimizer(case: Case) -> Found | None:
    """The optimizer holds parameters that the model no longer has.

    Find strangers in an optimizer while parameters of the model have no optimizer.

    Strangers alone prove nothing: a loss with weights of its own, or a model that is not watched, is trained too.
    """
    facts = case.need_facts()
    orphans = [each.name for each in facts.parameters if each.trainable and not each.owners]
    shapes = [str(tuple(case.parameters[name].shape)) for name in orphans]
    for optimizer in facts.optimizers:
        same = sum(shape in shapes for shape in optimizer.foreign)
        # Swapped in part, some of the model is still held; swapped as a whole, the shapes agree.
        if not orphans or not optimizer.foreign or not (held(optimizer) or same == len(shapes)):
            continue
        whole = not held(optimizer)
        return Found(
            severity="critical"
            if whole or any(module_of(name) == output_module(case) for name in orphans)
            else "warning",
            step=0,
            sites=(optimizer.name, *orphans),
            evidence=(
                above("parameters it holds that the model does not have", len(optimizer.foreign), 1),
                above("trainable parameters of the model that no optimizer holds", len(orphans), 1),
                fact("of the strangers, those with the shape of such a parameter", same),
            ),
            cause=f"{optimizer.name} holds {len(optimizer.foreign)} parameter(s) that the model does not have (shapes "
            f"{few(optimizer.foreign)}), while {few(orphans)} "
            + by_number(orphans, "has no optimizer: it was", "have no optimizer: they were")
            + " replaced after it was made.",
        )
    return None


@rule(
    "duplicate_param_in_groups",
    needs=[vitals.BACKWARDS],
    explains=["exploding_gradient", "loss_divergence", "lr_too_high"],
    exact=True,
    fix=(
        "Give each optimizer its own part of the model: encoder.parameters() to one, decoder.parameters() to the other."
    ),
    refute="If the two never step with the same gradients, as when they take turns, this is wrong.",
    since=0,
)
def duplicate_param_in_groups(case: Case) -> Found | None:
    """An optimizer holds a parameter more than once.

    Find a parameter that is moved twice with one gradient: by one optimizer that has it twice, or by two.
    """
    for optimizer in case.need_facts().optimizers:
        if optimizer.duplicates:
            return Found(
                step=0,
                sites=(optimizer.name, *optimizer.duplicates),
                evidence=(above("parameters held more than once", len(optimizer.duplicates), 1),),
                cause=f"{optimizer.name} holds {few(optimizer.duplicates)} more than once: each step moves "
                + by_number(optimizer.duplicates, "it twice.", "them twice."),
                fix="Make the list of parameters from a dict by id, or from model.parameters(), which has each once; "
                "tied weights have two names and are one parameter.",
                refute="If len(ids) == len(set(ids)) for the ids of all parameters in optimizer.param_groups, it is "
                "wrong.",
            )
    return _shared(case)


def _shared(case: Case) -> Found | None:
    """Find parameters of two optimizers that both step after each backward pass."""
    shared = [each for each in case.facts.parameters if len(each.owners) > 1 and each.trainable]
    if not shared or case.num_steps < DOUBLE_STEPS or case.take_turns():
        return None
    names, owners = [each.name for each in shared], shared[0].owners
    return Found(
        step=1,
        sites=(*owners, *names),
        evidence=(
            above("parameters that more than one optimizer holds", len(names), 1),
            fact("optimizers that step after one backward pass", len(owners)),
        ),
        cause=f"{few(owners)} both hold {few(names)}, and both step after the same backward pass: it is moved twice.",
    )


_LAYERS = ("Linear", "Bilinear", "Conv", "LSTM", "GRU", "RNN", "MultiheadAttention", "NonDynamicallyQuantizableLinear")


@dataclass(frozen=True, slots=True)
class _Reason:
    names: list[str]
    words: str
    severity: Severity


@rule(
    "frozen_by_mistake",
    needs=["parameter"],
    explains=[*NOT_TRAINED, "bad_init_scale"],
    exact=True,
    fix=(
        "Call .requires_grad_(True) on them before training; if they are meant to be frozen, leave them out of the "
        "optimizer."
    ),
    refute="If they were meant to stay as they are, this is wrong.",
    since=1,
)
def frozen_by_mistake(case: Case) -> Found | None:
    """Parameters were handed to the optimizer but cannot be trained.

    Find frozen parameters in an optimizer that nobody freezes on purpose.

    A frozen backbone is usual. What is not: an output layer that is frozen, weights that are frozen as they were drawn,
    and a model in which only norms can be trained.
    """
    optimizers = need_optimizers(case)
    names = [name for optimizer in optimizers for name in held(optimizer) if name in case.parameters]
    frozen = [name for name in dict.fromkeys(names) if not case.parameters[name].trainable]
    free = [name for name in dict.fromkeys(names) if case.parameters[name].trainable]
    reason = _reason(case, frozen, free) if frozen else None
    if reason is None:
        return None
    total = sum(size(case.parameters[name]) for name in {*frozen, *free})
    return Found(
        severity=reason.severity,
        step=0,
        sites=tuple(reason.names),
        evidence=(
            above("frozen parameters that an optimizer holds", len(frozen), 1),
            fact("their share of its elements", sum(size(case.parameters[name]) for name in frozen) / total),
            fact("parameters it can train", len(free)),
        ),
        cause=f"{few(reason.names)} {reason.words}: requires_grad is False, so the optimizer skips "
        + by_number(reason.names, "it.", "them."),
    )


def _reason(case: Case, frozen: list[str], free: list[str]) -> _Reason | None:
    if not free:
        return _Reason(frozen, "are all that the optimizer holds", "critical")
    head = output_module(case)
    last = [name for name in frozen if module_of(name) == head]
    if last:
        return _Reason(last, "belong to the output layer and are frozen", "critical")
    kinds = {case.parameters[name].kind for name in free}
    if kinds and all("Norm" in kind for kind in kinds):
        return _Reason(frozen, "are frozen and only norms can be trained", "warning")
    # A parameter that a module of the user's makes without a gradient, such as a fixed encoding, is meant so.
    layers = tuple(name for name in frozen if case.parameters[name].kind.startswith(_LAYERS))
    fresh = fresh_parameters(case, layers)
    if fresh:
        return _Reason(fresh, "are frozen as they were drawn at random", "warning")
    return None


BROKEN_STEPS = Threshold(5, "persistence: steps of its own optimizer without a gradient")
EXTRACTOR_SHARE = Threshold(0.1, "of all trainable elements; a model whose features are used is most of what runs")


@rule(
    "graph_break_detach",
    needs=[vitals.BACKWARDS_SEEN, "gradient", "parameter", "update"],
    explains=[*NOT_TRAINED],
    exact=True,
    fix=(
        "Look behind {last} for .detach(), .data, .item(), .numpy(), torch.no_grad() or a new torch.tensor(...) "
        "made from its output, and remove it."
    ),
    refute=(
        "Call the model once and print requires_grad of that module's output where it is used: if it is True up "
        "to the loss, the graph is whole."
    ),
    since=5,
)
def graph_break_detach(case: Case) -> Found | None:
    """A module runs, but the backward pass never reaches its parameters.

    Find parameters without a gradient in modules that ran and of which no parameter gets one.
    """
    modules = ran(case)
    lost = unreached(case)
    names = [name for name in lost.names if runner_of(case, name) in modules and not lost.has_live_kin(case, name)]
    names = [name for name in names if lost.steps[name] >= BROKEN_STEPS]
    if not names:
        return None
    share = share_of(case, names)
    # Features of a trained model are often computed under no_grad on purpose; weights as drawn are not, nor is a part
    # that is small beside the rest.
    drawn = fresh_parameters(case, tuple(names)) or not any(len(case.parameters[name].shape) > 1 for name in names)
    meant = not drawn and share >= EXTRACTOR_SHARE
    last = _last_in_order(case, names)
    return Found(
        severity="info" if meant else ("critical" if share > 0.5 else "warning"),
        step=lost.first_step,
        sites=tuple(names),
        evidence=(
            above(
                "steps of their optimizer without any gradient",
                min(lost.steps[name] for name in names),
                BROKEN_STEPS,
            ),
            fact("parameters", len(names)),
            fact("their share of all trainable elements", share),
        ),
        cause=f"The backward pass never reaches {few(names)}, though the module runs: the graph is cut behind {last}.",
        data={"behind": last},
        values={"last": last},
    )


def _last_in_order(case: Case, names: list[str]) -> str:
    cut = {runner_of(case, name) for name in names}
    return next((module for module in reversed(case.facts.order) if module in cut), sorted(cut)[-1])


UNUSED_SHARE = Threshold(0.02, "poolers and spare heads of published models stay below 1 % of the weights")
UNUSED_STEPS = Threshold(10, "persistence: multi-task loops and routed experts take turns within fewer steps")
ROUTED_STEPS = Threshold(64, "modules with siblings that ran may be routed to; the longest stretch that is compared")


@rule(
    "unused_parameters",
    needs=[vitals.BACKWARDS_SEEN, "gradient", "update"],
    exact=True,
    fix="Use the layer in forward(), or delete it. Look for a layer that is called twice where two were meant.",
    refute="Set {name} to zeros and run the same batch in eval mode: if the output changes, this finding is wrong.",
    since=10,
)
def unused_parameters(case: Case) -> Found | None:
    """No training pass uses these parameters.

    Find parameters without a gradient whose module never ran, or whose module uses its other parameters only.
    """
    modules = ran(case)
    lost = unreached(case)
    names = [name for name in lost.names if runner_of(case, name) not in modules or lost.has_live_kin(case, name)]
    names = [name for name in names if lost.steps[name] >= _patience(case, name, modules)]
    if not names:
        return None
    share = share_of(case, names)
    return Found(
        severity="warning" if share >= UNUSED_SHARE else "info",
        step=lost.first_step,
        sites=tuple(names),
        evidence=(
            above("steps without a gradient", min(lost.steps[name] for name in names), UNUSED_STEPS),
            above("their share of all trainable elements", share, UNUSED_SHARE)
            if share >= UNUSED_SHARE
            else fact("their share of all trainable elements", share),
        ),
        cause=f"No training pass uses {few(names)}: {by_number(names, 'it never gets', 'they never get')} a gradient.",
        values={"name": names[0]},
    )


def _patience(case: Case, name: str, modules: frozenset[str]) -> float:
    """Experts and heads that are taken in turns have siblings that ran; they get more time."""
    family = module_of(name).rpartition(".")[0]
    is_listed = case.modules.get(family) is not None and case.modules[family].kind in ("ModuleList", "ModuleDict")
    kin = f"{family}." if is_listed else "\0"
    routed = any(other.startswith(kin) for other in modules)
    return float(ROUTED_STEPS if routed else UNUSED_STEPS)


@rule(
    "tied_weights_broken",
    needs=["parameter", "facts.tied"],
    exact=True,
    fix=(
        "Assign the parameter itself, as in head.weight = embedding.weight, not a copy of its values ({copy} is a "
        "clone); do it again after anything that makes new parameters."
    ),
    refute="If a.data_ptr() == b.data_ptr() for the two, they are tied.",
    since=1,
)
def tied_weights_broken(case: Case) -> Found | None:
    """Weights that were meant to be one tensor are two.

    Find two weights that the model's settings call one, or that are equal though of layers of another class.

    Layers of the same class that are equal are copies of a block, which is how torch makes its encoders.
    """
    facts = case.need_facts()
    pairs = list(facts.tied)
    for each in facts.parameters:
        for other in each.equal_to:
            twin = case.parameters.get(other)
            if twin is not None and each.name < other and each.kind != twin.kind and each.trainable and twin.trainable:
                pairs.append((each.name, other))
    if not pairs:
        return None
    one, two = pairs[0]
    return Found(
        step=0,
        sites=(one, two),
        evidence=(above("pairs of weights that are equal in separate memory", len(pairs), 1), *_drift(case, one, two)),
        cause=f"{one} and {two} began as copies but are two tensors: tied weights drift apart as they train.",
        values={"copy": two},
    )


def _drift(case: Case, one: str, two: str) -> tuple[Evidence, ...]:
    tracks = [case.track(f"{name}:parameter") for name in (one, two)]
    if any(track is None for track in tracks):
        return ()
    norms = [float(statistics.norm(track.rows[-1])) for track in tracks if track is not None]
    apart = abs(norms[0] - norms[1]) / max(norms[0], norms[1], np.finfo(float).tiny)
    return (fact("difference of their norms by now, as a part of the larger", apart, f"{one}:parameter norm"),)


@rule(
    "ema_not_updated",
    needs=["parameter", "update"],
    exact=True,
    fix="Use a decay below 1 (0.999), and see that average.lerp_(weight, 1 - decay) gets the current weights.",
    refute="Compare the copy with what it was at the start: a difference refutes it.",
    since=10,
)
def ema_not_updated(case: Case) -> Found | None:
    """A moving average of the weights does not move.

    Find copies of trained weights that are written to step by step and stay what they were.

    A copy that nobody writes to is meant to stay, as a teacher is.
    """
    copies = [each for each in case.need_facts().parameters if each.equal_to and not each.owners and not each.trainable]
    copies = [each for each in copies if _is_rewritten(case, each.name)]
    updates = case.of("update") if copies else ()
    moved = {track.name for track in updates if float(statistics.norm(track.rows[-1])) > 0}
    stuck = [each for each in copies if moved.intersection(each.equal_to)]
    if not stuck:
        return None
    names = [each.name for each in stuck]
    track = case.track(f"{names[0]}:parameter")
    return Found(
        step=1,
        sites=tuple(names),
        evidence=(
            above("times it was written to", 0 if track is None else len(track) - 1, UNUSED_STEPS),
            fact("change since the start", 0.0, f"{names[0]}:parameter norm"),
            fact("copies like that", len(names)),
        ),
        cause=f"{few(names)} "
        + by_number(
            names,
            "is written to after every step but never changes",
            "are written to after every step but never change",
        )
        + ", while the weights that are averaged do: the average has a decay of 1.",
    )


def _is_rewritten(case: Case, name: str) -> bool:
    track = case.track(f"{name}:parameter")
    if track is None or len(track) <= UNUSED_STEPS:
        return False
    return not np.any(np.diff(track.rows, axis=0))
