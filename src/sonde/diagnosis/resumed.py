"""Where a run was taken up again."""

from __future__ import annotations

from sonde.diagnosis.case import Case


def boundaries(case: Case) -> tuple[int, ...]:
    """Return the first step of each attempt after the first."""
    first = case.history.first_step
    # A session that takes a run up again begins with a later step than 1.
    found = [first] if first is not None and first > 1 else []
    for event in case.events:
        if event.event_type != "resumed":
            continue
        start, last = event.data.get("start_step"), event.data.get("last_step")
        if isinstance(start, int):
            found.append(start)
        elif isinstance(last, int):
            found.append(last + 1)
    return tuple(sorted(set(found)))
