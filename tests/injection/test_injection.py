"""Whatever fails in Sonde: the program continues, its results are the same bits, and nothing is left after `close()`.

`make test` draws some faults; `SONDE_ALL_FAULTS=1` (in `make fuzz`) injects every kind into every function reached.
"""

from __future__ import annotations

import os
import random

import pytest
from tests.injection.campaign import KINDS, QUICK_FIRST, reach, run, trials, zygotes

ALL = bool(os.environ.get("SONDE_ALL_FAULTS"))
PROGRAMS = QUICK_FIRST if ALL else ("crashing", "adversarial")
SAMPLE = 16


@pytest.fixture(scope="module")
def zygote():
    with zygotes(1) as started:
        yield started[0]


@pytest.fixture(scope="module")
def reached(zygote):
    return reach(zygote, PROGRAMS)


@pytest.mark.timeout(12 * 3600 if ALL else 300)
def test_no_fault_reaches_the_program_or_is_left_behind(zygote, reached):
    todo = trials(reached, KINDS)
    if not ALL:
        todo = random.Random(19).sample(todo, SAMPLE)
    wrong = {trial: said for trial, _, said in run([zygote], todo, reached) if said}
    assert not wrong


@pytest.mark.parametrize(("method", "leaves"), [("__repr__", False), ("__exit__", False), ("close", True)])
def test_the_campaign_notices_what_reaches_the_program_and_what_is_left(zygote, reached, method, leaves):
    edge = next((name for name in reached.functions if name.startswith(f"session.Session.{method}:")), "none")
    answer = zygote.ask({"program": "crashing", "target": edge, "error": "RuntimeError", "patience_s": 0.0})
    assert bool(answer["raised"]) is (edge != "none")
    assert str(answer["escaped"]).startswith("RuntimeError" if edge != "none" else "None")
    assert any("hooks are left on torch" in each for each in answer["left"]) is leaves
    assert any("thread sonde-worker" in each for each in answer["left"]) is leaves
