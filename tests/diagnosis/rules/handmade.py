"""Make cases by hand: readings as plain lists, facts as short calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sonde.core import schema
from sonde.core.facts import EVENT_TYPE, Facts, GroupFacts, LossFacts, ModuleFacts, OptimizerFacts, ParameterFacts
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rules import RULES
from sonde.records import Block, Event, Finding, Site, summarise

_KEY = re.compile(r"(?P<name>[^:]+):(?P<quantity>[a-z_]+)(?P<part>[.\[][^#@]*)?(#(?P<call>\d+))?(?P<eval>@eval)?$")
UNKNOWN = "not measured"


def patient(
    readings: Mapping[str, Sequence[Any]],
    facts: Facts | None = None,
    *,
    about: Mapping[str, Mapping[str, Any]] | None = None,
    first_step: int = 1,
    skipped: Sequence[int] = (),
    events: Sequence[Event] = (),
    final: bool = False,
) -> Case:
    """Return a case. `readings` has, by key of a site, what was read in each step: a number, numbers, or None.

    `about` adds to sites what their key does not say: `dtype`, `kind`, `shape`.
    """
    case = Case()
    if facts is not None:
        case.take_event(Event(event_type=EVENT_TYPE, message="", timestamp=0.0, data=facts.to_json()))
    for event in events:
        case.take_event(event)
    sites = [_site(number, key, (about or {}).get(key, {})) for number, key in enumerate(readings)]
    case.take_sites(sites)
    for index in range(max(map(len, readings.values()), default=0)):
        rows = {
            site.id: values[index] for site, values in zip(sites, readings.values(), strict=True) if index < len(values)
        }
        rows = {number: value for number, value in rows.items() if value is not None}
        case.history.put(_block(first_step + index, rows, skipped=first_step + index in skipped))
    case.final = final
    return case


def ask(kind: str, case: Case) -> Finding | str | None:
    """Ask one rule, as the doctor would: a finding, None, or UNKNOWN."""
    rule = next(rule for rule in RULES if rule.kind == kind)
    if case.num_steps < rule.since or (rule.final and not case.final):
        return None
    try:
        return rule.check(case)
    except NotMeasured:
        return UNKNOWN


def found(kind: str, case: Case) -> Finding:
    """Return the finding of a rule, which must have one that says all a finding has to say."""
    finding = ask(kind, case)
    assert isinstance(finding, Finding), f"{kind}: {finding}"
    assert finding.kind == kind
    assert finding.sites
    assert all((finding.cause, finding.fix, finding.refute))
    return finding


def _site(number: int, key: str, about: Mapping[str, Any]) -> Site:
    parts = _KEY.match(key)
    assert parts is not None, key
    return Site(
        id=number,
        name=parts["name"],
        quantity=parts["quantity"],
        part=parts["part"] or "",
        call=int(parts["call"] or 0),
        phase="eval" if parts["eval"] else "train",
        **about,
    )


def _block(step: int, values: Mapping[int, Any], *, skipped: bool) -> Block:
    numbers = sorted(values)
    rows = np.zeros((len(numbers), schema.NUM_COLUMNS))
    for at, number in enumerate(numbers):
        rows[at] = summarise(np.asarray(values[number], np.float64))[0]
    return Block(
        step=step,
        time=float(step),
        sites=np.array(numbers, np.uint32),
        rows=rows,
        bins=np.zeros((len(numbers), schema.NUM_BINS), np.uint64),
        binned=np.zeros(len(numbers), np.bool_),
        skipped=skipped,
    )


# ---------------------------------------------------------------------- facts


def weight(
    name: str, *, shape: tuple[int, ...] = (4, 4), owners: tuple[str, ...] = ("optimizer",), **more: Any
) -> ParameterFacts:
    """Describe a parameter."""
    return ParameterFacts(name=name, shape=shape, owners=owners, **{"dtype": "float32", "kind": "Linear"} | more)


def module(name: str, kind: str, **settings: Any) -> ModuleFacts:
    """Describe a module."""
    return ModuleFacts(name=name, kind=kind, settings=settings)


def optimizer(*names: str, kind: str = "SGD", name: str = "optimizer", **more: Any) -> OptimizerFacts:
    """Describe an optimizer with one group."""
    return OptimizerFacts(name=name, kind=kind, groups=(GroupFacts(parameters=names),), **more)


def loss(kind: str, **more: Any) -> LossFacts:
    """Describe a loss that was called."""
    settings = {"reduction": "mean", "weighted": False} | more.pop("settings", {})
    return LossFacts(kind=kind, settings=settings, **more)


def model(*names: str, kind: str = "SGD", **more: Any) -> Facts:
    """Describe a model whose weights one optimizer holds, and whose modules run in this order."""
    modules = tuple(module(name.rpartition(".")[0], "Linear") for name in names)
    order = tuple(dict.fromkeys(each.name for each in modules))
    defaults: dict[str, Any] = {
        "parameters": tuple(weight(name) for name in names),
        "modules": modules,
        "optimizers": (optimizer(*names, kind=kind),),
        "order": order,
    }
    return Facts(**(defaults | more))
