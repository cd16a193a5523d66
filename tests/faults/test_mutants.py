"""General edits of programs: each does what its name says at one place, and nothing else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import mutants

EDITS = {
    "keyword is left out": ("f(x, lr=0.3)", "f(x)"),
    "another dimension": ("x.softmax(-1)", "x.softmax(0)"),
    "call is left out": ("relu(x)", "x"),
    "another operator": ("a + b", "a - b"),
    "operands are swapped": ("a - b", "b - a"),
    "second operand is left out": ("a * b", "a"),
    "sign is left out": ("-a", "a"),
    "bound moves by one": ("a[n:]", "a[n + 1:]"),
    "number x 10": ("0.5", "5.0"),
    "number / 10": ("0.5", "0.05"),
    "arguments are swapped": ("loss(a, b)", "loss(b, a)"),
    "statement is deleted": ("a = 1", "pass"),
    "condition is always true": ("a if b else c", "a if True else c"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_made_at_its_one_place(name):
    before, after = EDITS[name]
    edit = next(each for each in mutants.EDITS if each.name == name)
    function = ast.parse(f"def program(attach):\n    session = attach(model, optimizer)\n    {before}").body[0]
    (place,) = edit.places(function)
    edit.edit(place)
    assert ast.unparse(function.body[1]) == after


def test_all_edits_are_tried():
    assert set(EDITS) == {edit.name for edit in mutants.EDITS}


def test_what_a_program_returns_is_left_alone_since_it_measures_how_well_it_is():
    function = ast.parse("def program(attach):\n    return -(a + 0.5)").body[0]
    assert not any(edit.places(function) for edit in mutants.EDITS if edit.name != "statement is deleted")
