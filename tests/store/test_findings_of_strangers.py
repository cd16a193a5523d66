"""Findings from a file that anyone may have written: every field has its declared type, or the line is refused."""

from __future__ import annotations

import json
import math

import pytest

from sonde.errors import RunDamaged
from sonde.store.timeline import decode_finding

LINE = {"kind": "dead_relu", "severity": "warning", "confidence": 0.5, "step": 1, "last_step": 2}


def test_numbers_that_are_not_finite_come_back_as_numbers():
    evidence = {"name": "share", "value": "nan", "threshold": "-inf", "relation": ">"}
    found = decode_finding(json.dumps(LINE | {"evidence": [evidence]}).encode(), "here")
    assert math.isnan(found.evidence[0].value)
    assert found.evidence[0].threshold == -math.inf


def test_fields_of_later_versions_are_ignored():
    evidence = {"name": "share", "value": 1, "unit": "bytes"}
    found = decode_finding(json.dumps(LINE | {"evidence": [evidence], "owner": {"name": "x"}}).encode(), "here")
    assert found == decode_finding(json.dumps(LINE | {"evidence": [{"name": "share", "value": 1}]}).encode(), "here")


@pytest.mark.parametrize(
    "change",
    [
        {"last_step": "soon"},
        {"last_step": 7.5},
        {"kind": 5},
        {"cause": None},
        {"fix": ["x"]},
        {"sites": 3},
        {"sites": [1]},
        {"severity": "fatal"},
        {"evidence": [{"value": 1.0, "name": "a", "threshold": []}]},
        {"evidence": [{"value": "1", "name": "a"}]},
        {"evidence": [None]},
        {"step": None},
    ],
)
def test_what_cannot_be_read_as_a_finding_is_refused_by_name(change):
    with pytest.raises(RunDamaged, match=rf"here is not a finding: .*\$\.{next(iter(change))}"):
        decode_finding(json.dumps(LINE | change).encode(), "here")
