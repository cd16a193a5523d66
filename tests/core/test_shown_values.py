"""What a notebook or a prompt shows of the values a user gets: a line, not a wall."""

from __future__ import annotations

import msgspec
import numpy as np

from sonde.core import files
from sonde.diagnosis import Diagnosis
from sonde.records import Finding, Reading, Site
from sonde.store import Series

SITE = Site(id=3, name="fc.weight", quantity="gradient", shape=(8, 4))
FINDING = Finding(
    kind="missing_zero_grad",
    severity="critical",
    confidence=0.99,
    step=2,
    last_step=90,
    sites=("optimizer",),
    cause="Gradients are not cleared.",
    fix="Call optimizer.zero_grad().",
)


def test_a_site_is_shown_by_its_key():
    assert repr(SITE) == "<Site fc.weight:gradient (8, 4)>"


def test_a_reading_is_shown_by_its_numbers():
    shown = repr(Reading.of([1.0, 2.0, float("nan")], step=7))
    assert shown == "<Reading at step 7: 3 elements, mean 1.5, std 0.7071, min 1, max 2, 1 not finite>"
    merged = Reading.of([1.0], step=7).merge(Reading.of([3.0], step=8))
    assert repr(merged).startswith("<Reading at steps 7 to 8: 2 elements, mean 2")


def test_a_series_is_shown_by_where_it_ends():
    steps, spans = np.array([1, 2, 5]), np.ones(3, np.uint32)
    series = Series(site=SITE, stat="norm", steps=steps, values=np.array([1.0, 2.0, 0.123456]), spans=spans)
    assert repr(series) == "<Series fc.weight:gradient norm: 3 values, step 1 to 5, last 0.1235>"
    empty = Series(site=SITE, stat="norm", steps=steps[:0], values=np.zeros(0), spans=spans[:0])
    assert repr(empty) == "<Series fc.weight:gradient norm: empty>"


def test_findings_are_printed_with_the_fix():
    told = "critical missing_zero_grad (optimizer) since step 2: Gradients are not cleared. Fix: "
    told += "Call optimizer.zero_grad()."
    assert str(FINDING) == told
    diagnosis = Diagnosis((FINDING,), {}, {}, 90, 97)
    assert str(diagnosis) == told
    assert repr(diagnosis) == "<Diagnosis of 90 steps: missing_zero_grad (critical)>"
    assert str(Diagnosis((), {}, {}, 90, 97)) == "97 rules found nothing wrong in 90 steps."


def test_a_value_that_cannot_be_printed_is_named_by_its_class():
    class Silent:
        def __str__(self):
            raise ValueError

    class Empty:
        def tolist(self):
            raise NotImplementedError("no data")

    assert files.plain({"a": [Silent(), Empty()]}) == {"a": ["an object of class Silent", "an object of class Empty"]}


def test_text_that_utf8_cannot_hold_is_written_with_question_marks():
    class Named(msgspec.Struct):
        name: str
        value: float

    assert msgspec.json.decode(files.encode(Named("a\ud800b", float("nan")))) == {"name": "a?b", "value": None}
