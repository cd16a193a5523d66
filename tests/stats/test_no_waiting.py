"""Measuring never waits for a device: no operation that reads a value back, and no code that could."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tests.stats.measuring import Operations, device_kernel

import sonde.stats

# Operations whose result, or whose shape, the host must know before it can go on.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::_unique2",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_torch_operations_for_other_devices_read_nothing_back(dtype):
    kernel, tensor = device_kernel(), torch.ones(40, 30, dtype=dtype)
    arena, shadow = kernel.arena(2), torch.zeros(40, 30, dtype=dtype)

    with Operations() as operations:
        kernel.measure([tensor, tensor.t(), tensor[:, ::2]], [0, 1, 1], arena)
        kernel.measure_change([tensor], [shadow], [0], [1], arena)
        kernel.ship(arena)
        arena.reset()

    assert "aten::index_add_" in operations.names
    assert not operations.names & WAITING


def test_the_list_of_waiting_operations_would_catch_one():
    with Operations() as operations:
        torch.ones(3).sum().item()

    assert operations.names & WAITING


READS_BACK = {"item", "tolist", "cpu", "synchronize"}
# On the CPU a scalar costs no waiting; and a shipment may wait, in the worker's thread.
MAY_READ = {("torch_on_cpu.py", "item"), ("torch_on_cpu.py", "tolist"), ("torch_arena.py", "synchronize")}


def test_no_other_code_reads_values_back():
    found = {
        (path.name, node.attr)
        for path in Path(sonde.stats.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in READS_BACK
    }

    assert found == MAY_READ
