"""Findings from a file that anyone may have written: every field has its declared type, or the line is refused."""

from __future__ import annotations

import json

import pytest

from sonde.errors import RunDamaged
from sonde.store.timeline import decode_finding

LINE = {"kind": "dead_relu", "severity": "warning", "confidence": 0.5, "step": 1, "last_step": 2}


def test_fields_of_other_types_become_what_they_are_declared_as():
    odd = LINE | {"kind": 5, "cause": None, "fix": ["x"], "sites": [1, None], "explains": [2], "last_step": 7.0}
    evidence = {"name": 3, "value": "nan", "threshold": "1", "relation": 4, "series": None}
    found = decode_finding(json.dumps(odd | {"evidence": [evidence]}).encode(), "here")
    assert (found.kind, found.cause, found.sites, found.explains) == ("5", "None", ("1", "None"), ("2",))
    assert found.last_step == 7
    assert found.evidence[0].threshold == 1.0
    assert (found.evidence[0].name, found.evidence[0].relation) == ("3", "4")


@pytest.mark.parametrize(
    "change",
    [{"last_step": "soon"}, {"sites": 3}, {"evidence": [{"value": 1.0, "name": "a", "threshold": []}]}, {"step": None}],
)
def test_what_cannot_be_read_as_a_finding_is_refused_by_name(change):
    with pytest.raises(RunDamaged, match="here is not a finding"):
        decode_finding(json.dumps(LINE | change).encode(), "here")
