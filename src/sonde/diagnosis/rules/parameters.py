"""Rules about parameters: which optimizer holds them, and whether the backward pass reaches them."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

import numpy as np

from sonde.core import schema, signals, statistics
from sonde.diagnosis.case import Case
from sonde.diagnosis.fresh import fresh_parameters
from sonde.diagnosis.outlook import is_learning_well
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
from sonde.diagnosis.tape.data import idle_setting
from sonde.diagnosis.tape.flow import discarded_term, lost_in_choice, reaches_nothing
from sonde.diagnosis.tape.losses import cut_off
from sonde.diagnosis.tape.roles import sampled_without_gradient, unheld_leaf
from sonde.diagnosis.tape.unused import unread_outputs
from sonde.records import Evidence, Severity

_CONTENT = [schema.MIN, schema.MAX, schema.MEAN]


@dataclass(frozen=True, slots=True)
class Unreached:
    """Trainable parameters of an optimizer that never had a gradient, and the modules that had one."""

    names: tuple[str, ...]
    steps: dict[str, int]
    """By parameter: in how many of the last steps its optimizer stepped."""
    live: frozenset[str]
    """Modules with a parameter of their own, or below them, that had a gradient."""
    first_step: int

    def is_in_live_module(self, case: Case, name: str) -> bool:
        """Return whether another parameter of the same module had a gradient."""
        return runner_of(case, name) in self.live


def unreached(case: Case) -> Unreached:
    """Return the parameters that the backward pass never reached, though their optimizer stepped.

    Raises:
        NotMeasured: Optimizers or updates are not known.

    """
    return case.once("unreached", lambda: _find_unreached(case))


def _find_unreached(case: Case) -> Unreached:
    steps = own_steps(case)
    reached = {site.name for site in case.sites("gradient")}
    names = []
    for optimizer in need_optimizers(case):
        mine = [name for name in held(optimizer) if name in case.parameters and case.parameters[name].trainable]
        # If none has a gradient though backward passes reached them, the loop is at fault, not the graph.
        if any(name in reached for name in mine) or _is_never_reached(case, optimizer.name):
            lost = [name for name in mine if name not in reached and steps.get(name, 0) > 0]
            names += [name for name in lost if not _moves_without(case, name)]
    live: set[str] = set()
    for name in reached:
        module = runner_of(case, name)
        while module not in live:
            live.add(module)
            module = module.rpartition(".")[0] or "(model)"
    first = int(case.history.first_step or 0)
    return Unreached(tuple(dict.fromkeys(names)), steps, frozenset(live), max(first, 1))


def _moves_without(case: Case, name: str) -> bool:
    """Return whether a weight changes though it has no gradient: the program updates it itself, as a codebook."""
    track = case.track(f"{name}:parameter")
    return track is not None and bool((track.rows[:, _CONTENT] != track.rows[0, _CONTENT]).any())


def _is_never_reached(case: Case, optimizer: str) -> bool:
    backwards = case.vital(optimizer, signals.BACKWARDS_SEEN)
    return backwards is not None and not backwards.numbers().any()


ORPHAN_STEPS = Threshold(2, "persistence: steps with a gradient that no optimizer applies")


@rule(
    "params_not_in_optimizer",
    needs=["gradient", "parameter", "facts.hidden", "facts.order", "facts.program"],
    explains=[*NOT_TRAINED],
    exact=True,
    fix=(
        "Build the optimizer after the model is complete, from model.parameters(), or add them with "
        "optimizer.add_param_group(...). If they should not be trained, call requires_grad_(False) on them."
    ),
    refute="Compare one of them before and after optimizer.step(): if it has changed, this finding is wrong.",
    since=ORPHAN_STEPS,
)
def params_not_in_optimizer(case: Case) -> Found | None:
    """Parameters get gradients, but no optimizer holds them."""
    if (unfrozen := _changed_later(case, "parameters.unfrozen", "were unfrozen")) is not None:
        return unfrozen
    # A tensor that is an attribute of a module has a name, which says more than where it is used.
    if not case.facts.hidden and (taped := unheld_leaf(case)) is not None:
        return taped
    if not _steps_in_vain(case):
        need_optimizers(case)
    if case.facts.hidden:
        tensors = [each.name for each in case.facts.hidden if each.tensor]
        return _plain_tensors(tensors) if len(tensors) == len(case.facts.hidden) else _in_plain_list(case)
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
    return Found(
        severity="critical" if _is_head(case, orphans) else "warning",
        step=int(last.steps[0]) if last is not None else None,
        sites=("optimizer", *orphans),
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


def _steps_in_vain(case: Case) -> bool:
    """Return whether optimizers hold other parameters only, and a taped step shows that these get no gradients.

    An optimizer that changes an image, through a model whose parameters nobody froze, writes to the image.
    """
    tape = None if case.taped is None else case.taped.tape
    known = [each.foreign and not held(each) for each in case.need_facts().optimizers]
    if tape is None or not known or not all(known):
        return False
    stepped = any(mark.kind == "optimizer_exit" for mark in tape.marks)
    return stepped and not any(op.phase == "optimizer" and op.writes for op in tape.ops)


def _plain_tensors(names: list[str]) -> Found:
    return Found(
        severity="warning",
        step=1,
        sites=tuple(names),
        evidence=(fact("plain tensors of modules that get gradients and never change", len(names)),),
        cause=f"{few(names)} {by_number(names, 'is a plain tensor', 'are plain tensors')} with requires_grad, not "
        f"nn.Parameter: {by_number(names, 'it gets', 'they get')} gradients, but model.parameters() does not list "
        f"{by_number(names, 'it', 'them')}, so no optimizer updates {by_number(names, 'it', 'them')}.",
        fix="Wrap what should be learnt in nn.Parameter(...), and build the optimizer after that; use register_buffer "
        "for what should not change.",
    )


def _in_plain_list(case: Case) -> Found:
    names = [each.name for each in case.facts.hidden]
    keeper = names[0].split(".")[0]
    return Found(
        severity="critical",
        step=1,
        sites=tuple(names),
        evidence=(fact("parameters that get gradients, but that model.parameters() does not list", len(names)),),
        cause=f"{few(names)} {by_number(names, 'is', 'are')} in a plain list or dict ({keeper}), which torch does not "
        f"register: {by_number(names, 'it gets', 'they get')} gradients, but neither the optimizer nor state_dict() "
        "has "
        f"{by_number(names, 'it', 'them')}.",
        fix="Use nn.ModuleList, nn.ModuleDict or nn.ParameterList instead of the plain list or dict, and build the "
        "optimizer after that.",
        refute="Print len(list(model.parameters())): if these are counted, this finding is wrong.",
    )


def _is_head(case: Case, names: list[str]) -> bool:
    """Return whether any of these parameters belongs to the output layer."""
    return any(module_of(name) == output_module(case) for name in names)


def _is_changed(case: Case, name: str) -> bool:
    """Return whether a parameter has changed since the start: then something that is not watched trains it."""
    track = case.track(f"{name}:parameter")
    return track is not None and len(track) > 1 and bool(np.any(np.diff(track.rows, axis=0) != 0))


LATE_STEPS = Threshold(4, "steps of training after the change: an optimizer for them may be made next")


def _changed_later(case: Case, verb: str, what: str) -> Found | None:
    """Find parameters that were changed in the course of training and that no optimizer holds since."""
    for call in case.facts.calls(verb):
        names, lost = str(call.data.get("names")), call.data.get("lost")
        if call.count > 1 and case.step >= call.steps[0] + LATE_STEPS and isinstance(lost, int):
            listed = names.split(", ")
            more = f" and {lost - len(listed)} more" if lost > len(listed) else ""
            return Found(
                severity="warning",
                step=call.steps[0],
                sites=("optimizer", *listed),
                evidence=(above("trainable parameters that no optimizer holds", lost, 1),),
                cause=f"{names}{more} {what} in the course of training, before "
                f"the end of step {call.steps[0] + 1}, and no optimizer holds them.",
                fix="Add them to the optimizer with add_param_group, or make a new optimizer after the change.",
            )
    return None


@rule(
    "stale_params_in_optimizer",
    needs=["facts.order", "facts.program"],
    explains=[*NOT_TRAINED, "params_not_in_optimizer", "step_not_called"],
    exact=True,
    fix=(
        "Create the optimizer after the last change to the model: after replacing layers, loading, copying, .to(...) "
        "or "
        "wrapping it."
    ),
    refute=(
        "Compare id(p) of all parameters in optimizer.param_groups with those of model.parameters(): if they are the "
        "same, this finding is wrong."
    ),
)
def stale_params_in_optimizer(case: Case) -> Found | None:
    """The optimizer holds parameters that the model no longer has.

    And parameters of the model have no optimizer: foreign parameters alone may belong to a loss, or to another model.
    """
    if (found := _changed_later(case, "parameters.replaced", "were replaced")) is not None:
        return found
    facts = case.need_facts()
    orphans = [each.name for each in facts.parameters if each.trainable and not each.owners]
    shapes = [str(tuple(case.parameters[name].shape)) for name in orphans]
    for optimizer in facts.optimizers:
        same = sum(shape in shapes for shape in optimizer.foreign)
        # If a part was replaced, the rest is still held; if all was replaced, the shapes are equal.
        if not orphans or not optimizer.foreign or not (held(optimizer) or same == len(shapes)):
            continue
        whole = not held(optimizer)
        return Found(
            severity="critical" if whole or _is_head(case, orphans) else "warning",
            step=0,
            sites=(optimizer.name, *orphans),
            evidence=(
                above("parameters it holds that the model does not have", len(optimizer.foreign), 1),
                above("trainable parameters of the model that no optimizer holds", len(orphans), 1),
                fact("of the former, those with the shape of one of the latter", same),
            ),
            cause=f"{optimizer.name} holds {len(optimizer.foreign)} parameter(s) that the model does not have (shapes "
            f"{few(optimizer.foreign)}), while {few(orphans)} "
            + by_number(orphans, "has no optimizer: it was", "have no optimizer: they were")
            + " replaced after the optimizer was created.",
        )
    return None


@rule(
    "duplicate_param_in_groups",
    needs=[signals.BACKWARDS],
    explains=["exploding_gradient", "loss_divergence", "lr_too_high"],
    exact=True,
    fix=(
        "List each parameter once, as model.parameters() does; tied weights have two names but are one parameter. Give "
        "each optimizer its own part of the model."
    ),
    refute=(
        "Compare the ids of all parameters in optimizer.param_groups: if none occurs twice, this finding is wrong."
    ),
    since=0,
)
def duplicate_param_in_groups(case: Case) -> Found | None:
    """A parameter is updated twice with one gradient: it is held twice, by one optimizer or by two."""
    for optimizer in case.need_facts().optimizers:
        if optimizer.duplicates:
            return Found(
                step=0,
                sites=(optimizer.name, *optimizer.duplicates),
                evidence=(above("parameters held more than once", len(optimizer.duplicates), 1),),
                cause=f"{optimizer.name} holds {few(optimizer.duplicates)} more than once: each step updates "
                + by_number(optimizer.duplicates, "it twice.", "them twice."),
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
        cause=f"{few(owners)} both hold {few(names)}, and both step after the same backward pass: it is updated twice.",
        fix="Give each optimizer its own part of the model: encoder.parameters() to one, decoder.parameters() to the "
        "other.",
        refute="If the two never step with the same gradients, as when they alternate, this finding is wrong.",
    )


_LAYERS = ("Linear", "Bilinear", "Conv", "LSTM", "GRU", "RNN", "MultiheadAttention", "NonDynamicallyQuantizableLinear")


@dataclass(frozen=True, slots=True)
class _Reason:
    names: list[str]
    words: str
    severity: Severity


@rule(
    "frozen_by_mistake",
    needs=["parameter", "facts.order"],
    explains=[*NOT_TRAINED, "bad_init_scale"],
    exact=True,
    fix=(
        "Call .requires_grad_(True) on them before training; if they should be frozen, do not pass them to the "
        "optimizer."
    ),
    refute="If they should not be trained, this finding is wrong.",
)
def frozen_by_mistake(case: Case) -> Found | None:
    """The optimizer holds frozen parameters that should be trained.

    A frozen backbone is common, and all of a model is frozen beside adapters. A frozen output layer, frozen random
    weights, or a model of which only norms can be trained are not.
    """
    optimizers = need_optimizers(case)
    names = [name for optimizer in optimizers for name in held(optimizer) if name in case.parameters]
    frozen = [name for name in dict.fromkeys(names) if not case.parameters[name].trainable]
    frozen = [name for name in frozen if case.track(f"{name}:gradient") is None]  # it was unfrozen later
    free = [name for name in dict.fromkeys(names) if case.parameters[name].trainable]
    if idle := _idle_branches(case, free):
        return _frozen_at_zero(idle)
    if half := _half_frozen(case, free):
        return _without_its_weight(half)
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


def _half_frozen(case: Case, free: list[str]) -> str:
    """Return the frozen random weight of the only layer whose bias is trained; where all biases are, that is meant."""
    biases = [name for name in free if name.rpartition(".")[2] == "bias"]
    weights = [f"{name.removesuffix('bias')}weight" for name in biases]
    frozen = [name for name in weights if name in case.parameters and not case.parameters[name].trainable]
    if len(frozen) != 1 or case.track(f"{frozen[0]}:gradient") is not None:
        return ""
    return frozen[0] if fresh_parameters(case, (frozen[0],)) else ""


def _without_its_weight(name: str) -> Found:
    layer = module_of(name)
    return Found(
        severity="critical",
        step=0,
        sites=(name, layer),
        evidence=(fact("layers whose bias is trained without their weight", 1),),
        cause=f"{layer} trains its bias only: requires_grad of {name} is False, and it still has its random values.",
        fix=f"Set {name}.requires_grad = True, and give it to the optimizer.",
        refute=f"If {name} should keep the values that it was drawn with, this finding is wrong.",
    )


def _idle_branches(case: Case, free: list[str]) -> list[str]:
    """Return frozen matrices of zeros whose branch adds nothing: adapters that wait to be trained.

    They are layers of their own, or one of a low-rank pair beside a frozen matrix. Of several adapters those that are
    not chosen are frozen, too, so one that is trained speaks against it.
    """
    frozen = [name for name, each in case.parameters.items() if not each.trainable]
    zero = [name for name in frozen if case.parameters[name].zero and len(case.parameters[name].shape) > 1]
    zero = [name for name in zero if case.track(f"{name}:gradient") is None and not _was_filled(case, name)]
    trained = [name for name in free if case.parameters[name].zero and len(case.parameters[name].shape) > 1]
    if not zero or trained or _has_adapters(case, frozen, free):
        return []
    ran_modules = ran(case)
    holders = {module_of(name) for name in zero}
    pairs = [name for name in frozen if module_of(name) in holders]
    low_rank = _has_adapters(case, frozen, pairs)
    return [
        name
        for name in zero
        if runner_of(case, name) in ran_modules
        and (case.parameters[name].kind.startswith(_LAYERS) or (low_rank and len(case.parameters[name].shape) == 2))
    ]


def _was_filled(case: Case, name: str) -> bool:
    """Return whether a parameter has got other values since the session began."""
    track = case.track(f"{name}:parameter")
    return bool(case.facts.calls("load_state_dict")) if track is None else bool(track.stat("abs_max")[-1] != 0)


def _frozen_at_zero(names: list[str]) -> Found:
    return Found(
        severity="warning",
        step=0,
        sites=tuple(names),
        evidence=(above("frozen matrices that are all zeros", len(names), 1),),
        cause=f"{few(names)} {by_number(names, 'is', 'are')} frozen with all values 0, so "
        f"{by_number(names, 'its branch adds', 'their branches add')} nothing and cannot learn: requires_grad "
        "is False.",
        refute="Remove the branch: if the output of the same batch changes, this finding is wrong.",
    )


def _reason(case: Case, frozen: list[str], free: list[str]) -> _Reason | None:
    if not free:
        return _Reason(frozen, "are all that the optimizer holds", "critical")
    if _has_adapters(case, frozen, free):
        return None
    head = output_module(case)
    last = [name for name in frozen if module_of(name) == head]
    if last:
        return _Reason(last, "belong to the output layer and are frozen", "critical")
    kinds = {case.parameters[name].kind for name in free}
    if kinds and all("Norm" in kind for kind in kinds):
        return _Reason(frozen, "are frozen and only norms can be trained", "warning")
    # A parameter that a user's module creates without a gradient, such as a fixed encoding, is intended.
    layers = tuple(name for name in frozen if case.parameters[name].kind.startswith(_LAYERS))
    fresh = fresh_parameters(case, layers)
    if fresh:
        # Weights that were trained before may look random, and a model that learns well can do without these.
        severity: Severity = "info" if is_learning_well(case) else "warning"
        return _Reason(fresh, "are frozen with their random initial values", severity)
    return None


def _has_adapters(case: Case, frozen: list[str], free: list[str]) -> bool:
    """Return whether a pair of trained matrices is a low-rank branch beside a frozen one, as in LoRA.

    Matrices of r x n and m x r elements, with r below both m and n, have the effect of one of m x n elements.
    """
    of_frozen, of_free = _matrices(case, frozen), _matrices(case, free)
    return any(
        rank == inner < min(rows, columns) and not of_frozen[place].isdisjoint([(rows, columns), (columns, rows)])
        for place in of_free.keys() & of_frozen.keys()
        for (rank, columns), (rows, inner) in itertools.permutations(of_free[place], 2)
    )


def _matrices(case: Case, names: list[str]) -> dict[str, set[tuple[int, ...]]]:
    """Return the shapes of matrices by the modules that hold them, or hold their holders, up to three levels."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for name in names:
        shape = case.parameters[name].shape
        places = name.split(".")[:-1] if len(shape) == 2 else []
        for length in range(len(places), max(0, len(places) - _ADAPTER_LEVELS), -1):
            found.setdefault(".".join(places[:length]), set()).add(shape)
    return found


_ADAPTER_LEVELS = 3

BROKEN_STEPS = Threshold(5, "persistence: steps of its optimizer without a gradient")
BROKEN_MOST = Threshold(0.5, "share of trainable elements: most of the model does not learn")
EXTRACTOR_SHARE = Threshold(0.1, "share of trainable elements: a trained feature extractor is a large part of a model")


@rule(
    "graph_break_detach",
    needs=[signals.BACKWARDS_SEEN, "gradient", "parameter", "update", "facts.order"],
    explains=[*NOT_TRAINED],
    exact=True,
    fix=(
        "Look after {last} for .detach(), .data, .item(), .numpy(), torch.no_grad() or a new torch.tensor(...) made "
        "from its output, and remove it."
    ),
    refute=(
        "Print requires_grad of that module's output and of what is computed from it: if it is True up to the loss, "
        "this finding is wrong."
    ),
    since=BROKEN_STEPS,
)
def graph_break_detach(case: Case) -> Found | None:
    """A module runs, but the backward pass never reaches its parameters."""
    taped = reaches_nothing(case) or lost_in_choice(case) or sampled_without_gradient(case) or discarded_term(case)
    if taped is not None:
        return taped
    modules = ran(case)
    lost = unreached(case)
    names = [name for name in lost.names if runner_of(case, name) in modules and not lost.is_in_live_module(case, name)]
    names = [name for name in names if lost.steps[name] >= BROKEN_STEPS and not _is_last_of_a_loop(case, name)]
    names = names or _cut_on_tape(case)
    if not names:
        return None
    share = share_of(case, names)
    # Features of a trained model are often computed under no_grad on purpose; those of random weights are not.
    random = fresh_parameters(case, tuple(names)) or not any(len(case.parameters[name].shape) > 1 for name in names)
    last = _last_in_order(case, names)
    cut = cut_off(case, names)
    intended = not random and EXTRACTOR_SHARE <= share < 1 and (case.taped is None or case.taped.comes_first(names))
    return Found(
        severity="info" if intended else ("critical" if share > BROKEN_MOST else "warning"),
        step=lost.first_step,
        # What cuts off the output layer comes after the model.
        sites=((signals.LOSS, *names) if _is_head(case, names) else tuple(names)),
        evidence=(
            above("steps without a gradient", case.num_steps, BROKEN_STEPS),
            fact("parameters", len(names)),
            fact("their share of all trainable elements", share),
        ),
        cause=f"The backward pass never reaches {few(names)}, though the module runs: the graph is cut after {last}"
        f"{cut}.",
        data={"behind": last},
        values={"last": last},
    )


def _is_last_of_a_loop(case: Case, name: str) -> bool:
    """Return whether nothing uses what a layer computes, while its like in the same list get gradients.

    Each block of a list passes something on to the next, and the last one has none.
    """
    value = None if case.taped is None else case.taped.held.get(name)
    if case.taped is None or value is None or value in case.taped.needed:
        return False
    pattern = re.compile(re.sub(r"\\\.\d+", r"\\.\\d+", re.escape(f".{name}")))
    return any(site.name != name and pattern.fullmatch(f".{site.name}") for site in case.sites("gradient"))


def _cut_on_tape(case: Case) -> list[str]:
    """Return the parameters whose gradient a taped step cuts off or makes 0, and that never had another."""
    if case.taped is None or case.num_steps < BROKEN_STEPS:
        return []
    cut = [name for name in case.taped.cut_parameters() if name in case.parameters and _was_never_pulled(case, name)]
    return [name for name in cut if case.track(f"{name}:gradient") is not None or not _moves_without(case, name)]


def _was_never_pulled(case: Case, name: str) -> bool:
    track = case.track(f"{name}:gradient")
    return track is None or (len(track) >= BROKEN_STEPS and not bool((track.stat("abs_max") != 0).any()))


def _last_in_order(case: Case, names: list[str]) -> str:
    cut = {runner_of(case, name) for name in names}
    return next((module for module in reversed(case.facts.order) if module in cut), sorted(cut)[-1])


UNUSED_SHARE = Threshold(0.02, "share of trainable elements; spare heads of published models stay below 0.01")
UNUSED_STEPS = Threshold(10, "persistence: multi-task loops and routed experts alternate within fewer steps")
ROUTED_STEPS = Threshold(64, "the same for modules whose siblings ran, which may be routed to")


@rule(
    "unused_parameters",
    needs=[signals.BACKWARDS_SEEN, "gradient", "update", "facts.order"],
    exact=True,
    fix="Use the layer in forward(), or delete it. Look for a layer that is called twice instead of two layers.",
    refute="Set {name} to zeros and run the same batch in eval mode: if the output changes, this finding is wrong.",
    since=UNUSED_STEPS,
)
def unused_parameters(case: Case) -> Found | None:
    """Parameters are never used in training: they never get a gradient."""
    modules = ran(case)
    lost = unreached(case)
    names = [name for name in lost.names if runner_of(case, name) not in modules or lost.is_in_live_module(case, name)]
    cut = _cut_on_tape(case)
    if case.taped is None or case.taped.comes_first(cut):
        cut = []  # graph_break_detach takes them for a feature extractor
    names = [name for name in names if lost.steps[name] >= _patience(case, name, modules) and name not in cut]
    if not names:
        return _unread_outputs(case)
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


def _unread_outputs(case: Case) -> Found | None:
    """Find a part of a layer that never learns. A vocabulary that is padded to a round number has few such outputs."""
    found = unread_outputs(case)
    if found is None:
        return None
    share = float(found.data["share"]) * share_of(case, found.data["parameters"])
    return replace(found, severity="warning" if share >= UNUSED_SHARE else "info", data={})


def _patience(case: Case, name: str, modules: frozenset[str]) -> float:
    """Return how many steps to wait: experts and heads that alternate have siblings that ran."""
    family = module_of(name).rpartition(".")[0]
    is_listed = case.modules.get(family) is not None and case.modules[family].kind in ("ModuleList", "ModuleDict")
    kin = f"{family}." if is_listed else "\0"
    routed = any(other.startswith(kin) for other in modules)
    return float(ROUTED_STEPS if routed else UNUSED_STEPS)


@rule(
    "tied_weights_broken",
    needs=["parameter", "facts.tied", "facts.parameters"],
    exact=True,
    fix=(
        "Assign the parameter itself, as in head.weight = embedding.weight, not a copy of its values ({copy} is a "
        "clone); do it again after anything that creates new parameters."
    ),
    refute="Compare data_ptr() of the two: if they are equal, this finding is wrong.",
)
def tied_weights_broken(case: Case) -> Found | None:
    """Tied weights are two separate tensors.

    The model's config ties them, or they are equal in layers of different classes. Equal layers of the same class are
    copies of a block, as in torch's encoders.
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
        cause=f"{one} and {two} started as copies but are separate tensors: they drift apart in training.",
        values={"copy": two},
    )


def _drift(case: Case, one: str, two: str) -> tuple[Evidence, ...]:
    tracks = [case.track(f"{name}:parameter") for name in (one, two)]
    if any(track is None for track in tracks):
        return ()
    norms = [float(statistics.norm(track.rows[-1])) for track in tracks if track is not None]
    apart = abs(norms[0] - norms[1]) / max(norms[0], norms[1], np.finfo(float).tiny)
    return (fact("difference of their norms over the larger, now", apart, f"{one}:parameter norm"),)


@rule(
    "setting_without_effect",
    exact=True,
    fix="Set the attribute that torch reads, or call the method that is meant.",
    refute="Search torch's source for the attribute: if the module reads it, this finding is wrong.",
)
def setting_without_effect(case: Case) -> Found | None:
    """An attribute was set on a module or a parameter that torch never reads."""
    case.need_tape()
    return idle_setting(case)
