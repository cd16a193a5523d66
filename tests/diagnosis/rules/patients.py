"""Cases made by hand: what a run would have recorded, in plain dicts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sonde.core import facts as fact_types
from sonde.core import schema
from sonde.core.facts import Facts
from sonde.diagnosis.case import Case, NotMeasured
from sonde.records import QUANTITIES, Block, Event, Finding, Site, summarise

Values = Mapping[str, Any]


def patient(
    sites: Mapping[str, Sequence[Any]],
    facts: Facts | None = None,
    *,
    kinds: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtypes: Mapping[str, str] | None = None,
    events: Sequence[Event] = (),
    first_step: int = 1,
    final: bool = False,
) -> Case:
    """Make a case. `sites` maps a site's key, such as `optimizer:vital.leftover`, to one entry per step.

    An entry is a number, a list or array of numbers that is summarised, or None where the site was not read. `kinds`,
    `shapes` and `dtypes` go by the site's key.
    """
    case = Case()
    case.final = final
    made = [_site(number, key, kinds or {}, shapes or {}, dtypes or {}) for number, key in enumerate(sites)]
    case.take_sites(made)
    if facts is not None:
        case.take_event(Event(event_type=fact_types.EVENT_TYPE, message="", timestamp=0.0, data=facts.to_json()))
    for event in events:
        case.take_event(event)
    for at in range(max((len(values) for values in sites.values()), default=0)):
        entries = {
            number: values[at]
            for number, values in enumerate(sites.values())
            if at < len(values) and values[at] is not None
        }
        if entries:
            case.history.put(_block(first_step + at, entries))
    return case


def _site(
    number: int, key: str, kinds: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> Site:
    name, _, rest = key.rpartition(":")
    phase = "eval" if rest.endswith("@eval") else "train"
    rest = rest.removesuffix("@eval")
    quantity = max((each for each in QUANTITIES if rest.startswith(each)), key=len)
    site = Site(
        id=number,
        name=name,
        quantity=quantity,
        part=rest[len(quantity) :],
        phase=phase,
        kind=kinds.get(key, ""),
        shape=shapes.get(key, ()),
        dtype=dtypes.get(key, "float32"),
    )
    assert site.key == key, (site.key, key)
    return site


def _block(step: int, entries: dict[int, Any]) -> Block:
    numbers = np.array(sorted(entries), np.uint32)
    rows = np.stack([_row(entries[number]) for number in sorted(entries)])
    bins = np.zeros((len(numbers), schema.NUM_BINS), np.uint64)
    return Block(step=step, time=time.time(), sites=numbers, rows=rows, bins=bins, binned=np.zeros(len(numbers), bool))


def _row(entry: Any) -> np.ndarray:
    return summarise(np.atleast_1d(np.asarray(entry, dtype=np.float64)))[0]


def exception(text: str) -> Event:
    """Make the event that a session notes when the program raises."""
    return Event(event_type="exception", message=text, timestamp=0.0, step=1)


def asked(rule: Any, case: Case) -> Finding | None:
    """Ask a rule as the doctor does; what is not measured is no finding."""
    if case.num_steps < rule.since or (rule.final and not case.final):
        return None
    try:
        found = rule.check(case)
    except NotMeasured:
        return None
    if found is not None:
        assert found.kind == rule.kind
        assert found.cause
        assert found.fix
        assert found.refute
        assert found.evidence
        assert found.confidence is None or 0 < found.confidence < 1
    return found
