"""What holds for all rules: they name what they read and explain, and every number they compare with has a source."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from sonde.core import signals
from sonde.diagnosis.nonfinite import KINDS
from sonde.diagnosis.rule import Threshold
from sonde.diagnosis.rules import RULES, WANTED
from sonde.sensors.catalogue import SENSORS

FOLDER = Path(sys.modules["sonde.diagnosis.rules"].__file__).parent
MODULES = sorted(FOLDER.glob("[a-z]*.py"))
SIGNALS = {
    name: value
    for name, value in vars(signals).items()
    if isinstance(value, str) and name.isupper() and name not in ("LOOP", "LOSS")
}
FACTS = {
    "autocast", "bootstrapped", "carried", "columns", "edges", "hidden", "input_gradient", "loader", "order",
    "reshapes", "softmaxes", "tied",
}  # fmt: skip
"""Facts that only a sensor can state."""
BY_THE_PIPELINE = {signals.DATA_WAIT, signals.STEP_TIME}
PLAIN = {-1, 0, 1, 2}
"""Numbers that need no source: signs, nothing, one and several."""


def functions_of(function: FunctionType, seen: set[FunctionType]) -> Iterator[FunctionType]:
    """Yield a function and those of the rules that it calls."""
    if function in seen:
        return
    seen.add(function)
    yield function
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        if inspect.isfunction(value) and value.__module__.startswith("sonde.diagnosis.rules"):
            yield from functions_of(value, seen)


def names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_a_rule_names_every_signal_and_fact_that_it_reads(rule):
    read = {name for function in functions_of(rule.find, set()) for name in names_in(function.__code__)}
    assert {SIGNALS[name] for name in read & SIGNALS.keys()} <= set(rule.needs)
    assert {f"facts.{name}" for name in read & FACTS} <= set(rule.needs)


def test_a_sensor_produces_every_signal_that_a_rule_reads():
    made = {signal for sensor in SENSORS for signal in sensor.produces} | BY_THE_PIPELINE
    assert {SIGNALS[name] for name in SIGNALS} & WANTED <= made
    assert {f"facts.{name}" for name in FACTS} & WANTED <= made


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_a_rule_explains_only_kinds_that_exist(rule):
    assert rule.explains <= {other.kind for other in RULES} | KINDS


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_a_rule_is_named_after_its_kind_and_says_what_is_wrong_in_a_sentence(rule):
    assert rule.find.__name__ == rule.kind
    assert rule.summary.endswith(".")
    assert rule.fix.endswith(".")
    assert rule.refute.endswith(".")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_number_that_a_rule_compares_with_has_a_name(path):
    tree = ast.parse(path.read_text())
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and not is_about_shapes(node)]
    bare = [ast.unparse(node) for node in compared if set(numbers_in(node)) - PLAIN]
    assert not bare, "write NAME = Threshold(value, source) beside the rule"


def is_about_shapes(node: ast.Compare) -> bool:
    """Return whether a comparison is with a number of dimensions, which is a fact and not a threshold."""
    return "shape" in ast.unparse(node.left) and ast.unparse(node.left).startswith("len(")


def numbers_in(node: ast.AST) -> Iterator[float]:
    """Yield the numbers of an expression, without those that only pick elements."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node.value
    for child in ast.iter_child_nodes(node):
        is_pick = isinstance(node, ast.Subscript) and child is node.slice
        if not is_pick and not (isinstance(child, ast.keyword) and child.arg == "axis"):
            yield from numbers_in(child)


def test_every_threshold_has_a_source():
    modules = [sys.modules[f"sonde.diagnosis.rules.{path.stem}"] for path in MODULES]
    found = {name: value for module in modules for name, value in vars(module).items() if isinstance(value, Threshold)}
    assert len(found) > 100
    assert all(value.source for value in found.values())
