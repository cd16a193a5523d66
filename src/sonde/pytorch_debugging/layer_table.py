"""The calls of a forward pass as plain rows, for events, reports and the screen."""

from __future__ import annotations

from typing import Any

from sonde.checks import Call, CallTable, Seen
from sonde.pytorch_debugging.events import plain, statistics
from sonde.records import Reading


def key_of(call: Call) -> str:
    """Return the name of a call: that of its module, with a number from the second call on."""
    return f"{call.name}#{call.call}" if call.call else call.name


def activations(table: CallTable) -> dict[str, dict[str, Any]]:
    """Return every call by name: shapes, types and statistics of what went in and came out, time and memory."""
    return {key_of(call): _row(call) for call in table.calls}


def output_readings(table: CallTable) -> dict[str, Reading]:
    """Return the readings of all outputs, by the name of the call and the part."""
    return {
        f"{key_of(call)}{seen.part}": seen.reading
        for call in table.calls
        for seen in call.outputs
        if seen.reading is not None
    }


def in_brief(table: CallTable) -> dict[str, Any]:
    """Return what an event says of the table: the slowest calls and those that are not finite."""
    timed = sorted((call for call in table.calls if call.time_ms is not None), key=lambda call: -(call.time_ms or 0.0))
    bad = [
        key_of(call) for call in table.calls if any(seen.reading and seen.reading.nonfinite for seen in call.outputs)
    ]
    return {
        "num_calls": len(table.calls) + table.left_out,
        "slowest_ms": {key_of(call): round(call.time_ms or 0.0, 3) for call in timed[:5]},
        "nonfinite_outputs": bad[:20],
    }


def _row(call: Call) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "class": call.kind,
        "input_shape": [list(seen.shape) for seen in call.inputs],
        "output_shape": _only([list(seen.shape) for seen in call.outputs]),
        "inputs": [_tensor(seen) for seen in call.inputs],
        "outputs": [_tensor(seen) for seen in call.outputs],
        "time_ms": call.time_ms,
        "output_bytes": call.output_bytes,
    }
    if call.cuda_bytes is not None:
        shown["cuda_bytes"] = call.cuda_bytes
    return shown


def _tensor(seen: Seen) -> dict[str, Any]:
    about: dict[str, Any] = {"part": seen.part} if seen.part else {}
    about |= {"shape": list(seen.shape), "dtype": seen.dtype}
    return about | (plain(statistics(seen.reading)) if seen.reading is not None else {})


def _only(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
