"""What is noted of a loss's operations before its backward pass."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sonde.forensics.traps import LossTail


def test_a_number_in_the_graph_is_noted_under_a_dispatch_mode():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    with Mode():
        loss = x.sum() / 0
        (trap,) = LossTail((loss,), -1).traps()
    assert trap.name == "div"
