"""Mistakes that the benchmark injects into programs: each edit does what its name says, and nothing else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import fault_programs
import injected

LOOP = """
def program(attach):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    return F.cross_entropy(model(x), y).item()
"""
EDITS = {
    "zero_grad is missing": ("optimizer.zero_grad()", "pass"),
    "step is missing": ("optimizer.step()", "pass"),
    "backward is missing": ("loss.backward()", "pass"),
    "steps twice": ("optimizer.step()", "optimizer.step()\n        optimizer.step()"),
    "train() is missing": ("model.train()", "pass"),
    "eval() is missing": ("model.eval()", "pass"),
    "rate x 100": ("lr=0.1", "lr=0.1 * 100"),
    "weight decay 1": ("lr=0.1", "lr=0.1, weight_decay=1.0"),
    "sum instead of mean": (
        "loss = F.cross_entropy(model(x), y)", "loss = F.cross_entropy(model(x), y, reduction=_reduction())"
    ),
    "targets are shuffled": (
        "loss = F.cross_entropy(model(x), y)", "loss = F.cross_entropy(model(x), _in_training(_shuffled, y))"
    ),
    "sign of the loss": ("loss.backward()", "(-loss).backward()"),
    "optimizer holds two parameters": ("model.parameters()", "_last_two(model.parameters())"),
    "layers are frozen": ("    optimizer = torch", "    _freeze(model)\n    optimizer = torch"),
    "activations are missing": ("nn.ReLU(), ", ""),
    "dropout of 97 %": ("nn.Dropout(0.1)", "nn.Dropout(0.97)"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_a_mistake_is_made_at_its_one_place_and_not_in_what_is_measured(name):
    mistake = next(each for each in injected.MISTAKES if each.name == name)
    tree = ast.parse(LOOP)
    (place,) = mistake.places(tree.body[0])
    mistake.edit(place)
    old, new = EDITS[name]
    assert LOOP.count(old) == 1
    assert ast.unparse(tree) == ast.unparse(ast.parse(LOOP.replace(old, new)))


def test_gradients_are_cleared_behind_the_backward_pass():
    mistake = next(each for each in injected.MISTAKES if each.name == "zero_grad after backward")
    tree = ast.parse(LOOP)
    (place,) = mistake.places(tree.body[0])
    mistake.edit(place)
    lines = [line.strip() for line in ast.unparse(tree).splitlines()]
    assert lines.index("optimizer.zero_grad()") == lines.index("loss.backward()") + 1


def test_every_mistake_can_be_made_in_some_programs_and_names_findings_that_exist():
    some = fault_programs.load()[::6]
    drawn = injected.draw(list(injected.MISTAKES), some, each=3, seed=1)
    assert {name for name, _, _ in drawn} == {each.name for each in injected.MISTAKES}
    assert drawn == injected.draw(list(injected.MISTAKES), some, each=3, seed=1)
    known = {each.stem for each in (Path(__file__).resolve().parents[2] / "docs" / "findings").glob("*.md")}
    assert {cause for each in injected.MISTAKES for cause in each.causes} <= known


def test_a_mutant_is_trained_and_judged():
    found = injected.examine(("zero_grad is missing", "mlp_sgd", 0))
    assert found["said"][0] == "missing_zero_grad"
