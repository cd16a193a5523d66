"""The table of rules counts programs, not runs, and what it stores is what it counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import rule_table
from rule_table import count, reliability


def verdict(program, kind, *said, seed=0, repaired=False, also=(), part="one"):
    return {
        "program": program, "kind": kind, "also": also, "seed": seed, "repaired": repaired, "set": part,
        "said": [{"kind": each} for each in said],
    }  # fmt: skip


def test_each_program_counts_by_the_share_of_its_seeds():
    counts = count([verdict("p", "lr_too_high", "lr_too_high"), verdict("p", "lr_too_high", "dead_relu", seed=1)])
    assert (counts["lr_too_high"].faults, counts["lr_too_high"].first, counts["lr_too_high"].right) == (1, 0.5, 0.5)
    assert (counts["dead_relu"].right, counts["dead_relu"].wrong, counts["dead_relu"].clean) == (0, 0.5, 0)
    assert counts["lr_too_high"].confidence == pytest.approx(1.5 / 2.5)


def test_an_equivalent_name_is_right_and_a_warning_of_a_repaired_program_is_a_false_alarm():
    counts = count([
        verdict("p", "exploding_gradient", "dead_relu", "lr_too_high", also=("lr_too_high",)),
        verdict("p", "exploding_gradient", "lr_too_high", repaired=True),
    ])  # fmt: skip
    assert (counts["lr_too_high"].first, counts["lr_too_high"].right, counts["lr_too_high"].clean) == (0, 1, 1)
    assert counts["dead_relu"].wrong == 1
    assert counts["double_step"].confidence is None


def test_reliability_compares_with_what_the_other_sets_say():
    verdicts = [
        verdict("p", "double_step", "double_step", part="one"),
        verdict("q", "double_step", "double_step", part="two"),
        verdict("r", None, "dead_relu", part="two"),
    ]
    assert reliability(verdicts) == [(pytest.approx(2 / 3), True)] * 2


def test_the_counts_of_another_set_are_added_once(tmp_path, monkeypatch):
    monkeypatch.setattr(rule_table, "STORED", tmp_path / "reliability.json")
    first = [verdict("p", "double_step", "double_step", part="one")]
    second = [verdict("q", "double_step", "double_step", "dead_relu", part="two")]
    rule_table.store(count(first), first)
    rule_table.store(count(second), second, add=True)
    stored = json.loads(rule_table.STORED.read_text())
    assert stored["rules"] == {"dead_relu": {"right": 0.0, "wrong": 1.0}, "double_step": {"right": 2.0, "wrong": 0.0}}
    assert (stored["sets"], stored["faulty_programs"]) == (["one", "two"], 2)
    with pytest.raises(SystemExit, match="have two already"):
        rule_table.store(count(second), second, add=True)
