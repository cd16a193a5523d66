"""Recorded steps and findings reach the thread that trains: each step whole and once, each finding when it is news."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sonde.core import schema
from sonde.record.live_steps import StepFeed
from sonde.records import Block, Finding, Site

SITES = [
    Site(id=0, name="fc.weight", quantity="gradient"),
    Site(id=1, name="fc", quantity="output"),
    Site(id=2, name="loss", quantity="scalar"),
]


def block(step, *sites, skipped=False):
    rows = np.array([schema.row_of_value(10.0 * step + site) for site in sites])
    bins = np.zeros((len(sites), schema.NUM_BINS), np.uint64)
    binned = np.zeros(len(sites), bool)
    numbers = np.array(sites, np.uint32)
    return Block(step=step, time=0.0, sites=numbers, rows=rows, bins=bins, binned=binned, skipped=skipped)


def feed(most=10):
    made = StepFeed(lambda site: None if site.quantity == "output" else site.name, most)
    made.take_sites(SITES)
    return made


def means(step):
    return {label: float(row[schema.MEAN]) for label, row in step.rows.items()}


def test_blocks_of_a_step_make_one_step_that_is_complete_when_the_next_begins():
    live = feed()
    live.take_block(block(1, 1, 2))
    live.take_block(block(1, 0, skipped=True))
    assert live.take() == []
    live.take_block(block(2, 0))
    (step,) = live.take()
    assert (step.step, step.skipped, means(step)) == (1, True, {"loss": 12.0, "fc.weight": 10.0})
    live.close()
    assert [each.step for each in live.take()] == [2]


def test_a_flush_completes_a_step_only_after_its_optimizer_has_stepped():
    live = feed()
    live.take_block(block(1, 1, 2))
    live.flush()
    assert live.take() == []
    live.take_block(block(1, 0))
    live.flush()
    assert [each.step for each in live.take()] == [1]
    live.take_block(block(1, 2))  # logged after that: the step is not handed over twice
    live.close()
    assert live.take() == []


def test_the_oldest_steps_are_dropped_and_counted_if_nobody_takes_them():
    live = feed(most=3)
    for step in range(1, 6):
        live.take_block(block(step, 0))
    live.take_block(block(6, 1))  # nothing in it is wanted
    live.close()
    assert ([each.step for each in live.take()], live.dropped) == ([3, 4, 5], 2)


def test_a_finding_is_handed_over_if_it_is_new_or_worse_or_withdrawn():
    live = feed()
    found = Finding(kind="dead_relu", severity="warning", step=1, last_step=1)
    worse = replace(found, severity="critical")
    gone = replace(found, withdrawn=True)
    for finding in (gone, found, found, worse, found, gone, gone, found):
        live.take_finding(finding)
    assert live.take_findings() == [found, worse, gone, found]
    assert live.take_findings() == []
