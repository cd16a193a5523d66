"""The programs are what they say: the faulty ones are ill, their repaired twins and the healthy ones are well."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections import Counter
from pathlib import Path

import fault_programs
import pytest
import torch

PROGRAMS = fault_programs.load()
FAULTS = [program for program in PROGRAMS if program.kind]
HEALTHY = [program for program in PROGRAMS if not program.kind]
STRIDE = 1 if os.environ.get("SONDE_ALL_PROGRAMS") else 24
"""`make test` trains one program in 24: they know nothing of Sonde, so no change to Sonde can alter what they do.
`make bench-faults` trains them all."""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("program", FAULTS[::STRIDE], ids=lambda program: program.name)
def test_the_fault_does_harm_and_its_repair_does_not(program):
    assert program.run(fixed=False) >= program.ill
    assert program.run(fixed=True) <= program.well


@pytest.mark.parametrize("program", HEALTHY[::STRIDE], ids=lambda program: program.name)
def test_a_healthy_program_learns(program):
    assert program.run() <= program.well


@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.name)
def test_a_twin_differs_in_one_expression(program):
    tree = ast.parse(textwrap.dedent(inspect.getsource(program.train)))
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "fixed"]
    assert len(uses) == 1
    assert ast.get_docstring(tree.body[0])
    assert program.well < program.ill


def test_a_program_repeats_itself():
    program = next(program for program in FAULTS if program.name == "starts_with_a_huge_head")
    assert program.run(seed=3) == program.run(seed=3)
    assert program.run(seed=3) != program.run(seed=4)


def test_programs_know_nothing_of_sonde():
    folder = Path(fault_programs.__file__).parent
    for path in folder.rglob("*.py"):
        imported = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not [node for node in imported if "sonde" in ast.unparse(node)]


def test_the_programs_cover_all_groups_architectures_and_tasks():
    groups = Counter(program.group for program in FAULTS)
    least = {"A": 10, "B": 8, "C": 6, "D": 8, "E": 4, "F": 5, "G": 7, "H": 2}
    assert all(groups[group] >= count for group, count in least.items())
    assert len([program for program in HEALTHY if not program.deceptive]) >= 20
    assert len([program for program in HEALTHY if program.deceptive]) >= 10
    architectures = {"mlp", "cnn", "resnet", "lstm", "gru", "transformer", "autoencoder", "vae", "gan", "moe"}
    assert architectures <= {program.arch for program in PROGRAMS}
    assert {"classification", "regression", "lm", "reconstruction", "adversarial"} <= {p.task for p in PROGRAMS}
    sets = Counter(program.set for program in PROGRAMS)
    assert 0.2 <= sets["holdout_1"] / (sets["holdout_1"] + sets["dev"]) <= 0.35
    assert all(sets[f"holdout_{number}"] >= 40 for number in range(2, 16))
