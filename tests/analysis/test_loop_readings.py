"""Phases and memory of a run, read back without torch."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.analysis.loop import leaking, memory_slopes, phase_shares
from sonde.core import signals
from sonde.records import Site
from sonde.store.series import Series


class MadeRun:
    """A run with given curves, by key."""

    def __init__(self, curves):
        self.curves = curves
        self.sites = [self.site(index, key) for index, key in enumerate(curves)]

    @staticmethod
    def site(index, key):
        name, _, rest = key.rpartition(":")
        quantity, dot, part = rest.partition(".")
        return Site(id=index, name=name, quantity=quantity, part=dot + part)

    def tapes(self):
        return [9]

    def series(self, key, stat):
        assert stat == "mean"
        steps, values = self.curves[key]
        site = next(site for site in self.sites if site.key == key)
        return Series(site, stat, np.asarray(steps), np.asarray(values, float), np.ones(len(steps), np.uint32))


def loop(name, steps, values):
    return f"{signals.LOOP}:vital.{name}", (steps, values)


def test_shares_are_totals_over_the_steps_after_warming_up_that_were_not_taped():
    steps = np.arange(1, 11)
    run = MadeRun(
        dict(
            [
                loop("step_time", steps[1:], [9.0, 9.0, 9.0] + [2.0] * 4 + [60.0, 2.0]),
                loop("data_wait", steps, [8.0] * 4 + [1.0] * 6),
                loop("time_forward", steps, [0.5] * 10),
                loop("time_evaluation", [7], [0.25]),
            ]
        )
    )
    found = phase_shares(run)
    assert (found.step_s, found.mean_s, found.steps) == (2.0, 2.0, 5)
    assert found.shares == pytest.approx({"data_wait": 0.5, "forward": 0.25, "evaluation": 0.25 / 10})
    assert next(iter(found.shares)) == "data_wait"
    assert found.unexplained == pytest.approx(0.25 - 0.25 / 10)
    assert phase_shares(run, first=2, last=2).shares["data_wait"] == pytest.approx(8 / 9)


def test_a_run_without_step_times_says_nothing():
    assert phase_shares(MadeRun({})) is None
    assert phase_shares(MadeRun(dict([loop("step_time", [2], [0.0])]))) is None


def test_memory_that_grows_steadily_is_found_by_place():
    steps = np.arange(10, 1010, 10)
    rss = 1e9 + 2e5 * steps
    run = MadeRun(
        {
            "process.rss:scalar": (steps, rss),
            "cuda:0.allocated:scalar": (steps, np.full(100, 5e9)),
            "cuda:0.reserved:scalar": (steps, rss),
            "loss:scalar": (steps, rss),
        }
    )
    slopes = memory_slopes(run)
    assert set(slopes) == {"process", "cuda:0"}
    assert slopes["process"].per_step == pytest.approx(2e5)
    assert set(leaking(run)) == {"process"}


def test_what_sonde_itself_holds_is_not_a_leak_of_the_process():
    steps = np.arange(0, 1000, 10)
    own = 1e6 * steps.astype(float)
    curves = {"process.rss:scalar": (steps, 1e9 + own)}
    assert set(leaking(MadeRun(curves))) == {"process"}
    both = MadeRun(curves | {"process.sonde:scalar": (steps, own)})
    assert leaking(both) == {}
    assert memory_slopes(both)["process"].per_step == pytest.approx(0)
