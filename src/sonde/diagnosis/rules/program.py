"""Rules about what a program does between its steps: checkpoints, seeds, passes over the data, the best weights.

They read `Facts.program`, a timeline of calls with the user's lines, and look for relations that hold or do not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde.core import signals
from sonde.core.facts import CallFacts
from sonde.core.metric_names import better_direction, is_held_out
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Found, Threshold, above, below, by_number, fact, few, rule
from sonde.diagnosis.symptoms import NOT_TRAINED
from sonde.diagnosis.track import Values


def _number(call: CallFacts, name: str) -> int:
    value = call.data.get(name)
    return int(value) if isinstance(value, int | float) else 0


# ---------------------------------------------------------------------- checkpoints


RENAMED_TENSORS = Threshold(2, "tensors: a single one may fit by chance")


@rule(
    "checkpoint_not_loaded",
    needs=["facts.program"],
    explains=["not_learning", "underfitting", "loss_plateau", "overfitting"],
    exact=True,
    fix="Rename the keys before loading, as in {{k.removeprefix('{prefix}'): v for k, v in state.items()}}, and leave "
    "strict=True, or print what load_state_dict returns.",
    refute="Compare a weight before and after load_state_dict: if it has changed, this finding is wrong.",
    since=0,
    lasting=True,
)
def checkpoint_not_loaded(case: Case) -> Found | None:
    """A checkpoint was loaded, but its weights did not come into the model."""
    for call in case.facts.calls("load_state_dict"):
        given, matched = _number(call, "given"), _number(call, "matched")
        if given and not matched:
            return Found(
                step=call.steps[0] if call.steps else 0,
                sites=(call.about or "(model)",),
                evidence=(fact("tensors given to load_state_dict", given), below("of them loaded", 0, 0)),
                cause=f"load_state_dict(strict=False){call.place} loaded none of the {given} tensors it was given: no "
                f"key of the state is a name in {call.data.get('kind')}.",
                values={"prefix": "module."},
            )
        renamed = _number(call, "renamed")
        if renamed >= RENAMED_TENSORS and 2 * renamed >= given - matched:
            return Found(
                step=call.steps[0] if call.steps else 0,
                sites=(call.about or "(model)",),
                evidence=(
                    fact("tensors given to load_state_dict", given),
                    fact("of them loaded", matched),
                    above("left ones that fit but for the first part of their names", renamed, RENAMED_TENSORS),
                ),
                cause=f"load_state_dict(strict=False){call.place} left {given - matched} of {given} tensors out: "
                f"{renamed} of them have the names and shapes of ones that {call.data.get('kind')} lacks, but for the "
                "first part of the name.",
                values={"prefix": "module."},
            )
    for call in case.facts.calls("checkpoint.found"):
        prefix = str(call.data.get("prefix"))
        lacks = prefix.startswith("-")
        owner = str(call.data.get("of") or "")
        return Found(
            step=0,
            sites=(owner or "(model)",),
            evidence=(fact(f"tensors in {call.about}", _number(call, "given")), below("of them in the model", 0, 0)),
            cause=f"{f'`{owner}`' if owner else 'The model'} has none of the weights in {call.about}, though its names "
            "fit if "
            + (f"`{prefix[1:]}` is put before them" if lacks else f"`{prefix}` is removed")
            + ": load_state_dict(strict=False) loads nothing then, and does not complain.",
            values={"prefix": prefix.removeprefix("-")},
        )
    return None


HELD_STATES = Threshold(3, "states of different steps held at once: a variable that is assigned anew holds two")


@rule(
    "best_state_shares_memory",
    needs=["facts.program"],
    explains=["overfitting"],
    exact=True,
    fix="Copy it: best = copy.deepcopy(model.state_dict()), or write it to a file at once.",
    refute="Compare a tensor of the kept state with the model's after another step: if they differ, this is wrong.",
    lasting=True,
)
def best_state_shares_memory(case: Case) -> Found | None:
    """Weights that were kept for later are not a copy: they change with every step."""
    for call in case.facts.calls("load_state_dict"):
        taken = call.data.get("taken")
        if call.data.get("own") and isinstance(taken, int) and call.steps and call.steps[-1] > taken:
            return _shared(call, f"loads the state that model.state_dict() returned{_at(call)} {_ago(call, taken)}")
    for call in case.facts.calls("torch.save"):
        taken = call.data.get("taken")
        if isinstance(taken, int) and call.steps:
            return _shared(call, f"saves the state that model.state_dict() returned{_at(call)} {_ago(call, taken)}")
    for call in case.facts.calls("state_dict"):
        held = _number(call, "held") + 1
        if held > HELD_STATES:
            return Found(
                step=call.steps[0],
                sites=(call.about,),
                evidence=(above("states of different steps that are held at once", held, HELD_STATES),),
                cause=f"{held} results of model.state_dict(){call.place} are kept from different steps. They share the "
                "model's memory, so all of them are the present weights.",
            )
    for call in case.facts.calls("second_name"):
        return Found(
            step=call.steps[0],
            sites=("(model)",),
            evidence=(fact("variables that hold the model", 2),),
            cause=f"`{call.about}` and `{call.data.get('of')}` are one and the same model: `{call.about}` changes with "
            "every step, too.",
            fix=f"Copy it: {call.about} = copy.deepcopy({call.data.get('of')}).",
            refute=f"Print {call.about} is {call.data.get('of')}: if it is False, this finding is wrong.",
        )
    return None


def _at(call: CallFacts) -> str:
    return CallFacts(verb="", line=str(call.data.get("taken_at") or "")).place


def _ago(call: CallFacts, taken: int) -> str:
    return f"{call.steps[-1] - taken} steps before"


def _shared(call: CallFacts, what: str) -> Found:
    return Found(
        step=call.steps[-1],
        sites=(call.about or "(model)",),
        evidence=(fact("steps since it was taken", call.steps[-1] - _number(call, "taken")),),
        cause=f"The call{call.place} {what}. That state shares the model's memory: it has followed every step, and is "
        "the present weights.",
    )


KEPT_TIMES = Threshold(3, "times that weights were kept: two records may come by chance")


@rule(
    "best_selected_backwards",
    needs=["facts.program"],
    exact=True,
    fix="Turn the comparison around: a lower loss is better, a higher accuracy is better; start from float('inf') for "
    "a loss and from 0 for an accuracy.",
    refute="Print the number and the best so far where weights are kept: if the number is better, this is wrong.",
    since=2,
)
def best_selected_backwards(case: Case) -> Found | None:
    """The weights that are kept as the best are those with the worst validation so far."""
    if (found := _restores_worst(case)) is not None:
        return found
    for call in (*case.facts.calls("torch.save"), *case.facts.calls("state_dict")):
        if call.count < KEPT_TIMES or call.count != len(call.steps):
            continue
        for name in case.scalars():
            if not is_held_out(name) or (curve := case.scalar(name)) is None:
                continue
            worse = -better_direction(name)
            kept = _kept(curve[0], call.steps)
            if worse and kept is not None and _are_records(kept, worse * curve[1]):
                extreme = "highest" if worse > 0 else "lowest"
                return Found(
                    step=call.steps[0],
                    sites=("(loop)",),
                    evidence=(
                        above("times that weights were kept", call.count, KEPT_TIMES),
                        fact(f"of them at the {extreme} {name} so far", call.count),
                        fact("validations", len(curve[0])),
                    ),
                    cause=f"Weights are kept{call.place} each time {name} is the {extreme} so far, and only then: the "
                    "worst ones are taken for the best.",
                )
    return None


def _restores_worst(case: Case) -> Found | None:
    """Find weights that are loaded in the end, and that had the worst of all validations when they were taken."""
    for call in case.facts.calls("load_state_dict"):
        # Training that goes on from there was rewound on purpose.
        taken = _taken_at(case, call) if call.steps[-1] >= case.step else 0
        for name in case.scalars() if taken else ():
            if not is_held_out(name) or (curve := case.scalar(name)) is None:
                continue
            worse, before = -better_direction(name), curve[0] <= call.steps[-1]
            values, marks = worse * curve[1][before], _kept(curve[0][before], (taken,))
            if not worse or marks is None or len(values) < RESTORED_VALIDATIONS or not np.isfinite(values).all():
                continue
            kept = np.array(marks)
            if values[kept].max() > values[~kept].max():
                return Found(
                    step=call.steps[-1],
                    sites=("(loop)",),
                    evidence=(
                        above("validations until then", len(values), RESTORED_VALIDATIONS),
                        fact(f"{name} when the weights were taken", float(worse * values[kept].max())),
                        fact(f"best {name} of all", float(worse * values.min())),
                    ),
                    cause=f"The weights that are loaded in the end{call.place} were taken after step {taken}, at the "
                    f"worst {name} of all: the worst ones are taken for the best.",
                )
    return None


RESTORED_VALIDATIONS = Threshold(5, "validations: the first of a few may be the best by chance")


def _taken_at(case: Case, call: CallFacts) -> int:
    """Return after which step the weights that are loaded were taken; 0 if that is not known."""
    if isinstance(call.data.get("taken"), int):
        return int(call.data["taken"] or 0)
    sources = case.facts.calls("state_dict")
    is_only = len(sources) == 1 and not case.facts.calls("torch.load") and call.data.get("matched")
    return sources[0].steps[-1] if is_only and sources[0].steps[-1] < call.steps[0] else 0


def _kept(steps: NDArray[np.int64], taken: tuple[int, ...]) -> list[bool] | None:
    """Return after which validations weights were kept; None if that is not clear."""
    # A number that is logged between two steps may belong to the one before or to the one after.
    for shift in (0, 1):
        marks = [int(step) for step in steps]
        if all(each + shift in marks for each in taken):
            wanted = {each + shift for each in taken}
            return [mark in wanted for mark in marks]
    return None


def _are_records(kept: list[bool], values: Values) -> bool:
    """Return whether weights were kept at the records of these values, at no other time, and not at the lows."""
    if all(kept) or not np.isfinite(values).all():
        return False
    best = np.maximum.accumulate(np.concatenate([[-np.inf], values[:-1]]))
    lows = np.minimum.accumulate(np.concatenate([[np.inf], values[:-1]]))
    is_record = [bool(each) for each in values > best]
    return kept == is_record and kept != [bool(each) for each in values < lows]


INITIALISED_AGAIN = Threshold(2, "times: one restart with the same optimizer may be meant")


@rule(
    "weights_reset_in_loop",
    needs=["facts.program"],
    explains=[*NOT_TRAINED, "not_learning", "loss_plateau", "loss_spike", "loss_oscillation"],
    exact=True,
    fix="Initialise the weights once, before the optimizer is made and before the loop.",
    refute="Compare a weight before and after the line: if it is the same, this finding is wrong.",
    lasting=True,
)
def weights_reset_in_loop(case: Case) -> Found | None:
    """Weights are initialised anew in the course of training, and the optimizer goes on."""
    calls = [call for call in case.facts.calls("initialised") if len(set(call.steps)) >= INITIALISED_AGAIN]
    # The last time may come before a new optimizer is made: it counts once there were steps after it.
    calls = [call for call in calls if case.step > call.steps[-1] or len(set(call.steps)) > INITIALISED_AGAIN]
    if not calls:
        return None
    times = max(len(set(call.steps)) for call in calls)
    return Found(
        step=calls[0].steps[0],
        sites=tuple(call.about for call in calls),
        evidence=(
            above("times that weights were initialised after the first step", times, INITIALISED_AGAIN),
            fact("parameters", len(calls)),
        ),
        cause=f"{few([call.about for call in calls])} {by_number(calls, 'is', 'are')} initialised anew{calls[0].place} "
        f"{times} times after training began, with the same optimizer: what was learnt is lost each time.",
    )


# ---------------------------------------------------------------------- seeds

SEEDED_AGAIN = Threshold(3, "persistence: times that training went on from the same random state")


def repeated_seed(case: Case) -> CallFacts | None:
    """Return the call that sets the same seed again and again while training draws random numbers."""
    calls = case.facts.calls("seed")
    return next((call for call in calls if _number(call, "repeats") >= SEEDED_AGAIN), None)


@rule(
    "seed_reset_in_loop",
    needs=["facts.program"],
    explains=["overfitting"],
    exact=True,
    fix="Set the seed once, before the loop.",
    refute="Print torch.initial_seed() and torch.rand(1) in the loop: if the number changes, this finding is wrong.",
    lasting=True,
)
def seed_reset_in_loop(case: Case) -> Found | None:
    """The same seed is set again and again, so that the same random numbers come each time."""
    call = repeated_seed(case)
    if call is None:
        return None
    between = np.diff(call.steps)
    each = f"every {int(np.median(between))} steps" if len(between) and np.median(between) > 1 else "in every step"
    return Found(
        step=call.steps[0],
        sites=("(loop)",),
        evidence=(
            above("times that training went on from the same random state", _number(call, "repeats"), SEEDED_AGAIN),
            fact("the seed", _number(call, "seed")),
        ),
        cause=f"{call.about}({call.data.get('seed')}){call.place} is called {each}: shuffling, dropout, noise and "
        "augmentation repeat the same random numbers each time.",
    )


# ---------------------------------------------------------------------- passes over the data

ASKED_AGAIN = Threshold(2, "times that an iterator was asked for a batch after its end")
CUT_PASSES = Threshold(2, "passes over the data that stopped at the same batch")


@rule(
    "batches_never_seen",
    needs=["facts.program"],
    explains=["overfitting"],
    exact=True,
    fix="Let the loop run to the end of the loader (look for a break, zip() with a shorter loader, or next(iter())), "
    "or pass shuffle=True, so that each pass stops at other samples.",
    refute="Count the samples that come in one epoch: if it is the length of the dataset, this finding is wrong.",
)
def batches_never_seen(case: Case) -> Found | None:
    """Each pass over the data stops at the same place, and the rest is never seen."""
    for call in case.facts.calls("loader.pass"):
        length, most, trained = (_number(call, name) for name in ("length", "most", "trained"))
        fixed = call.data.get("sampler") == "SequentialSampler"
        again = _number(call, "asked_again")
        if again >= ASKED_AGAIN:
            return _used_up(call, again)
        if call.data.get("length") == 0 and _number(call, "dataset_length") and call.data.get("drop_last"):
            return _all_dropped(call)
        if fixed and trained >= CUT_PASSES and 0 < most == _number(call, "least") < length:
            return Found(
                step=call.steps[0],
                sites=("loader",),
                evidence=(
                    above("passes over the data", trained, CUT_PASSES),
                    below("batches of each", most, length),
                    fact("batches that the loader has", length),
                ),
                cause=f"Each pass over the loader{call.place} stops after {most} of {length} batches, and the order is "
                "always the same: the other samples are never seen.",
            )
    return None


def _used_up(call: CallFacts, again: int) -> Found:
    return Found(
        step=call.steps[0],
        sites=("loader", "(loop)"),
        evidence=(above("times that it was asked for a batch after its end", again, ASKED_AGAIN),),
        cause=f"The iterator made of the loader{call.place} is used up and asked again {again} times: it gives no "
        "batch any more, so these loops do nothing.",
        fix="Write iter(loader) again for each pass, or loop over the loader itself: for batch in loader.",
        refute="Count the batches of the second pass: if there are some, this finding is wrong.",
    )


def _all_dropped(call: CallFacts) -> Found:
    samples, size = _number(call, "dataset_length"), _number(call, "batch_size")
    return Found(
        step=call.steps[0],
        sites=("loader",),
        evidence=(below("samples in the data", samples, size), fact("samples of a full batch", size)),
        cause=f"The loader{call.place} gives no batch at all: it has {samples} samples, a batch has {size}, and "
        "drop_last=True drops what does not fill one.",
        fix="Pass drop_last=False, or a smaller batch_size.",
    )


LOGGED = Threshold(4, "numbers that were logged: with fewer, many curves fit")
SUM_FITS = Threshold(0.1, "largest distance from the sum of all losses, over it: not every loss is recorded")
SUM_DIFFERS = Threshold(2.0, "the same sum over that of the last round alone, at the end")


@rule(
    "metric_not_reset",
    needs=["facts.losses"],
    fix="Set the running sum to 0 at the start of each epoch.",
    refute="Print the running sum at the start of an epoch: if it is 0, this finding is wrong.",
    since=LOGGED,
)
def metric_not_reset(case: Case) -> Found | None:
    """A logged loss is the sum over all epochs so far: its running sum is never set back."""
    seen = case.curve(f"{signals.LOSS}:output")
    if seen is None or len(seen[0]) < 2 * LOGGED:
        return None
    for name in case.scalars():
        curve = case.scalar(name) if "loss" in name.lower() and not is_held_out(name) else None
        if curve is None or not LOGGED <= len(curve[0]) <= len(seen[0]) // 2 or not (curve[1] > 0).all():
            continue
        whole = np.array([_total(seen, 0, int(step)) for step in curve[0]])
        last = _total(seen, int(curve[0][-2]), int(curve[0][-1]))
        if not (whole > 0).all() or not last > 0:
            continue
        off = np.abs(curve[1] / whole * (whole[0] / curve[1][0]) - 1)
        if off.max() <= SUM_FITS and whole[-1] >= SUM_DIFFERS * last:
            return Found(
                step=int(curve[0][1]),
                sites=("(loop)",),
                evidence=(
                    below("largest distance from the sum of all losses so far", float(off.max()), SUM_FITS),
                    above("sum of all losses over that of the last round", float(whole[-1]) / last, SUM_DIFFERS),
                ),
                cause=f"{name} grows with the sum of all losses since the start: its running sum is never set back, so "
                "it rises while the loss falls.",
            )
    return None


def _total(seen: tuple[NDArray[np.int64], Values], after: int, until: int) -> float:
    """Return the sum of the losses of some steps; what is missing counts as the mean of the others."""
    chosen = seen[1][(seen[0] > after) & (seen[0] <= until)]
    return float(chosen.mean()) * (until - after) if len(chosen) else float("nan")


@rule(
    "resume_overrides_lr",
    needs=["facts.program"],
    explains=["lr_too_low", *NOT_TRAINED],
    exact=True,
    fix="Set the rate after loading: for group in optimizer.param_groups: group['lr'] = lr.",
    refute="Print optimizer.param_groups[0]['lr'] before and after load_state_dict: if it is the same, this is wrong.",
    since=20,
)
def resume_overrides_lr(case: Case) -> Found | None:
    """A checkpoint of the optimizer has brought back its old learning rate, at which the model hardly learns."""
    for call in case.facts.calls("optimizer.found"):
        rate, given = call.data.get("lr"), call.data.get("given")
        if not isinstance(rate, int | float) or not isinstance(given, int | float) or call.data.get("scheduled"):
            continue
        seen = case.learning_rate(call.about)
        kept = seen is not None and bool((seen[1] == rate).all())
        if rate < given and kept and case.learning.state in ("flat", "worse"):
            return Found(
                step=0,
                sites=(call.about,),
                evidence=(
                    fact("learning rate the optimizer was created with", given),
                    below("learning rate it trains with", rate, given, f"{call.about}.group0.lr:scalar mean"),
                ),
                cause=f"{call.about} was created with a learning rate of {given:g}, but trains with {rate:g}, the rate "
                "in the checkpoint that it loaded, and the loss does not fall.",
            )
    return None
