"""Rules about copies of weights beside a model: moving averages, target networks, teachers."""

from __future__ import annotations

import math
import re
from typing import Final

import numpy as np

from sonde.core import statistics
from sonde.core.facts import CallFacts
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Found, Threshold, above, below, by_number, fact, few, rule
from sonde.diagnosis.tape.flow import discarded_average, stale_buffers
from sonde.diagnosis.tape.roles import swapped_average
from sonde.records import Evidence

COPY_STEPS = Threshold(10, "persistence: steps in which a copy is written to and keeps its values")
OWN_LOADS = Threshold(2, "times that weights were loaded into themselves: once may be a test")
COPY_PAIRS = Threshold(3, "steps in a row that were compared")
NEVER_STEPS = Threshold(256, "steps: targets are replaced after dozens or hundreds of steps, averages in each")
AVERAGED_SHARE = Threshold(0.51, "share of itself that an average keeps: below half, new weights outweigh old")
AVERAGED_STEPS = Threshold(128, "steps: averages begin with small shares, which rise within a hundred steps")
_FOLLOWS: Final = re.compile(r"(?<![a-z])(ema|target|shadow|average)(?![a-z])")
"""Names of what must follow; a teacher or a reference may be meant to stay as it is."""


@rule(
    "ema_not_updated",
    needs=["parameter", "update", "facts.parameters", "facts.program"],
    exact=True,
    fix="Use a decay near 1, but below it (0.999), and check that average.lerp_(weight, 1 - decay) gets the current "
    "weights.",
    refute="Compare the copy with its initial values: if they differ, this finding is wrong.",
    since=COPY_STEPS,
)
def ema_not_updated(case: Case) -> Found | None:
    """A copy of the weights that should follow them does not: it never changes, or does not average.

    A copy that is not written to is intended, such as a fixed teacher.
    """
    found = _loads_itself(case) or _follows_wrongly(case) or _averaged_none(case) or _lags_behind(case)
    if found is not None:
        return found
    if (taped := discarded_average(case) or swapped_average(case) or stale_buffers(case)) is not None:
        return taped
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
            above("times it was written to", 0 if track is None else len(track) - 1, COPY_STEPS),
            fact("change since the start", 0.0, f"{names[0]}:parameter norm"),
            fact("copies like this", len(names)),
        ),
        cause=f"{few(names)} "
        + by_number(
            names,
            "is written to after every step but never changes",
            "are written to after every step but never change",
        )
        + ", while the weights that are averaged do: the average has a decay of 1.",
    )


def _averaged_none(case: Case) -> Found | None:
    """Find averaged weights that are evaluated and into which nothing was ever averaged."""
    for call in case.facts.calls("averaged.call") if case.final else ():
        if call.data.get("filled") is False:
            return Found(
                step=call.steps[-1],
                sites=("(validation)", "(loop)"),
                evidence=(fact("weights that were averaged", 0),),
                cause=f"Averaged weights are evaluated{call.place}, but update_parameters was never called on them: "
                "they are still the weights of the start.",
                fix="Call averaged.update_parameters(model) after optimizer.step().",
                refute="Print averaged.n_averaged: if it is not 0, this finding is wrong.",
            )
    return None


def _loads_itself(case: Case) -> Found | None:
    """Find a module beside the model that loads the very state that it has."""
    for call in case.facts.calls("load_state_dict"):
        times = len(set(call.steps))
        if call.data.get("own") and call.data.get("taken") is None and not call.about and times >= OWN_LOADS:
            name = str(call.data.get("name") or call.data.get("kind"))
            return Found(
                step=call.steps[0],
                sites=(name, "(loop)"),
                evidence=(above("times that it loaded its own state", times, OWN_LOADS),),
                cause=f"{name}.load_state_dict(){call.place} loads the state of {name} itself: it never gets the "
                "weights that are trained.",
                fix=f"Load the state of the network that learns: {name}.load_state_dict(model.state_dict()).",
                refute=f"Compare a weight of {name} before and after that line: if it changes, this finding is wrong.",
            )
    return None


def _follows_wrongly(case: Case) -> Found | None:
    """Find a copy that takes the wrong weights, or in the wrong shares: two steps in a row show how it is made."""
    for call in case.facts.calls("copy"):
        pairs, rewritten, changed, averaged = (
            int(call.data.get(name) or 0) for name in ("pairs", "rewritten", "changed", "averaged")
        )
        of, follows = str(call.data.get("of") or ""), str(call.data.get("follows") or "")
        if of and pairs >= COPY_PAIRS and rewritten == pairs:
            return _copy(
                call,
                "is written to in every step and keeps its values, while the weights change: its decay is 1.",
                above("steps in which it was written to and did not change", rewritten, COPY_PAIRS),
            )
        if of and follows and of != follows and averaged >= COPY_PAIRS - 1:
            return _copy(
                call,
                f"began as a copy of {of}, but takes the weights of {follows}.",
                above("steps in which it took those weights", averaged, COPY_PAIRS - 1),
                fix=f"Take the weights of {of}.",
            )
        if call.data.get("holder") and of and changed >= COPY_PAIRS and not averaged:
            return _copy(
                call,
                f"began as a copy of {of} and is trained by {call.data.get('holder')}, too: it does not follow {of}, "
                "it learns by itself.",
                above("steps in which the optimizer changed it", changed, COPY_PAIRS),
                fix="Give the optimizer the parameters of the network that learns only, and compute the target under "
                "torch.no_grad().",
            )
        still = int(call.data.get("still") or 0)
        is_still = not changed and still >= NEVER_STEPS and not _loads_others(case)
        if case.final and of and is_still and (_FOLLOWS.search(call.about.lower()) or _makes_targets(case, call)):
            return _copy(
                call,
                f"began as a copy of {of} and still has the values of the start, after {still} steps: nothing updates "
                "it.",
                above("steps without a change", still, NEVER_STEPS),
                fix=f"Update it in the loop, after optimizer.step(), from {of}.",
            )
        if _averages_nothing(call, changed, averaged, pairs):
            share = float(call.data.get("share") or 0.0)
            return _copy(
                call,
                f"keeps {share:.2g} of itself in every step and takes {1 - share:.2g} of the weights: it averages over "
                f"no more than {math.ceil(1 / (1 - share))} steps.",
                below("share of itself that it keeps", share, AVERAGED_SHARE),
                fact("steps in a row that were compared", pairs),
            )
    return None


def _makes_targets(case: Case, call: CallFacts) -> bool:
    """Return whether a copy, whatever its name, is the only one beside a loss that asks for values of next states."""
    others = [each for each in case.facts.calls("copy") if each.about != call.about]
    return not others and any(each.has_moving_target for each in case.rounds)


def _loads_others(case: Case) -> bool:
    """Return whether some weights were loaded in the course of the training: a copy may be looked at long before."""
    return any(call.steps[-1] > 0 and not call.data.get("own") for call in case.facts.calls("load_state_dict"))


def _lags_behind(case: Case) -> Found | None:
    """Find an average that is over and still consists mostly of the weights that training began with."""
    if not case.final or any(each.has_own_targets or each.has_moving_target for each in case.rounds):
        return None  # a teacher may lag behind: it is not what is evaluated
    for call in case.facts.calls("copy"):
        pairs, averaged = (int(call.data.get(name) or 0) for name in ("pairs", "averaged"))
        least, steps = float(call.data.get("least") or 0), min(case.step, case.num_steps)
        if not call.data.get("of") or not _AVERAGES.search(call.about.lower()) or not 0 < least < 1:
            continue
        if averaged != pairs or pairs < LAG_PAIRS or steps < LAG_STEPS:
            continue
        kept = least**steps
        if kept >= LAG_SHARE:
            return _copy(
                call,
                f"keeps {least:.6g} of itself in every step: after the {steps} steps of the run it still consists to "
                f"{kept:.0%} of the weights of the start. Evaluating it evaluates a network that is hardly trained.",
                above("share of the weights of the start in it when the run ended", kept, LAG_SHARE),
                fact("share of itself that it keeps, the least that was measured", least),
                fact("steps", steps),
                fix="Let the decay rise from a small one, as in decay = min(0.999, (1 + step) / (10 + step)), or take "
                f"one that fits the run: 1 - 10 / {steps} = {1 - 10 / steps:.3g}.",
            )
    return None


LAG_SHARE = Threshold(0.5, "share of the weights of the start in an average: more than all that was learnt since")
LAG_STEPS = Threshold(100, "steps of the run: in a shorter one there is nothing to average")
LAG_PAIRS = Threshold(6, "pairs of steps that were compared: each of them must show an average")
_AVERAGES: Final = re.compile(r"(?<![a-z])(ema|avg|average|averaged|shadow|swa|polyak|smooth|smoothed)(?![a-z])")
"""Names of averages that are used in the end; targets, teachers and momentum encoders are used in each step."""


def _averages_nothing(call: CallFacts, changed: int, averaged: int, pairs: int) -> bool:
    most, last = call.data.get("most"), int(call.data.get("last") or 0)
    if not isinstance(most, float) or not averaged == changed == pairs or last < AVERAGED_STEPS:
        return False
    # A copy that gets all weights at once, such as that of an actor, is not an average unless its name says so.
    return most < AVERAGED_SHARE and (most > 0 or bool(call.data.get("named")))


def _copy(call: CallFacts, what: str, *evidence: Evidence, fix: str = "") -> Found:
    return Found(
        step=max(1, int(call.data.get("last") or 0)),
        sites=(call.about, "(loop)"),
        evidence=evidence,
        cause=f"`{call.about}` {what}",
        fix=fix,
    )


def _is_rewritten(case: Case, name: str) -> bool:
    track = case.track(f"{name}:parameter")
    if track is None or len(track) <= COPY_STEPS:
        return False
    return not np.any(np.diff(track.rows, axis=0))
