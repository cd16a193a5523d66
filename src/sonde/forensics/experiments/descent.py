"""Descent: whether the optimizer's own update lowers the loss on the batch it was made from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from sonde.forensics.experiments.kernels import CannotRepeat
from sonde.forensics.experiments.optimizers import Rebuilt
from sonde.forensics.experiments.program import Change, World
from sonde.forensics.experiments.subject import Measured, Subject

FACTORS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_NUDGE: Final = 1e-4
"""Size of a change of a parameter over its own, for finite differences in float64."""


def descent(subject: Subject) -> Measured:
    """Take the optimizer's update, or a multiple of it, and compare the loss of the same batch before and after.

    Also asks by finite differences, in float64, whether parameters without a gradient have an effect on the loss.
    """
    numbers: dict[str, float | None] = {}
    words: dict[str, str] = {}
    without = _effect_without_gradient(subject)
    numbers["without_gradient"] = float(len(without))
    words["without_gradient"] = ", ".join(without[:5])
    text = f"{len(without)} parameters have an effect on the loss and no gradient" if without else ""
    try:
        along = _along_update(subject)
    except CannotRepeat as reason:
        words["no_update"] = str(reason)
        return Measured(text or f"no update to follow: {reason}", numbers, words)
    numbers |= along
    start, whole, best = along["start"], along["loss.1"], along["best_factor"]
    text = text or f"the update takes the loss from {start:.4g} to {whole:.4g}; best at {best:g} times its length"
    return Measured(text, numbers, words)


def _along_update(subject: Subject) -> dict[str, float]:
    program = subject.program
    world, moved = program.world(), program.world()
    done = program.repeat(moved)
    for name, gradient in program.gradients(moved, done).items():
        moved.parameters[name].grad = gradient
    gradients = {name: each.grad.clone() for name, each in moved.parameters.items() if each.grad is not None}
    Rebuilt(program, moved).step()
    update = {name: moved.parameters[name].detach() - each.detach() for name, each in world.parameters.items()}
    slope = sum(float((each * update[name]).sum()) for name, each in gradients.items())
    numbers = {"start": float(done.loss.detach()), "slope": slope, "update": _norm(update.values())}
    numbers["gradient"] = _norm(gradients.values())
    numbers["weights"] = _norm(each.detach() for each in world.trained())
    best = (math.inf, 0.0)
    for factor in FACTORS:
        loss = _loss_at(subject, world, update, factor)
        numbers[f"loss.{factor:g}"] = loss
        best = min(best, (loss if math.isfinite(loss) else math.inf, factor))
    numbers["best_factor"] = best[1] if best[0] < numbers["start"] else 0.0
    return numbers


def _loss_at(subject: Subject, world: World, update: dict[str, Tensor], factor: float) -> float:
    program = subject.program
    values = {}
    for each in program.tape.given("parameter"):
        if each.name in update and each.id in world.values:
            values[each.id] = world.values[each.id].detach() + factor * update[each.name]
    with torch.no_grad():
        return float(program.repeat(world, Change(values=values)).loss)


def _effect_without_gradient(subject: Subject) -> list[str]:
    """Return parameters that get no gradient, though changing them slightly changes the loss."""
    program, double = subject.program, subject.is_double
    if not double:
        return []
    world = program.world(double=True)
    gradients = program.gradients(world, program.repeat(world, Change(double=True)))
    # A network that another optimizer trains may be cut off on purpose.
    held = {name for info in program.tape.optimizers for group in info.groups for name in group.names}
    silent = [name for name, each in gradients.items() if name in held and (each is None or not bool(each.any()))]
    ids = {each.name: each.id for each in program.tape.given("parameter")}
    start = float(subject.exact.loss)
    generator = torch.Generator().manual_seed(0)
    found = []
    for name in silent[:50]:
        value = world.parameters[name].detach()
        size = _NUDGE * (float(value.square().mean().sqrt()) or 1.0)
        nudged = value + size * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        with torch.no_grad():
            loss = float(program.repeat(world, Change(values={ids[name]: nudged}, double=True)).loss)
        if abs(loss - start) > 1e-10 * max(abs(start), 1e-30):
            found.append(name)
    return found


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))
