"""Modes: the same batch in training and evaluation mode, twice, and in float64."""

from __future__ import annotations

import torch

from sonde.forensics.experiments.program import Change
from sonde.forensics.experiments.subject import Measured, Subject


def modes(subject: Subject) -> Measured:
    """Repeat the step in evaluation mode, a second time, and in float64."""
    program = subject.program
    world = program.world()
    first = program.repeat(world)
    gradients = program.gradients(world, first)
    with torch.no_grad():
        train, again = float(first.loss.detach()), float(program.repeat(world).loss)
        evaluated = float(program.repeat(world, Change(eval_mode=True)).loss)
        still = float(program.repeat(world, Change(dropout=False)).loss)
    numbers: dict[str, float | None] = {"train": train, "again": again, "eval": evaluated, "without_dropout": still}
    text = f"the loss is {train:.4g} in training mode and {evaluated:.4g} in evaluation mode"
    if subject.is_double:
        exact = program.world(double=True)
        done = program.repeat(exact, Change(double=True))
        precise = program.gradients(exact, done)
        error = size = 0.0
        for name, gradient in gradients.items():
            other = precise[name]
            if gradient is not None and other is not None:
                error += float((gradient.double() - other).square().sum())
                size += float(other.square().sum())
        numbers["float64"] = float(done.loss.detach())
        numbers["gradient_error"] = (error / size) ** 0.5 if size > 0 else None
        text += f"; float64 changes its gradient by {numbers['gradient_error'] or 0:.1e}"
    return Measured(text, numbers)
