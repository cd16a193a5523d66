"""Learnability: whether the model can fit this batch, as it is trained or with one thing changed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sonde.core.tape import ModuleInfo
from sonde.forensics.experiments.kernels import CannotRepeat
from sonde.forensics.experiments.optimizers import INSTEAD_OF_ZERO, Rebuilt, clips
from sonde.forensics.experiments.program import Change, World
from sonde.forensics.experiments.subject import Measured, Subject

STEPS: Final = 100
LEAST_STEPS: Final = 20
LEARNT: Final = 0.5
"""Share of the way from a guess to the lowest possible loss at which a fit ends early as learnt."""
NEW_WEIGHTS: Final = "default initialisation"
ODD: Final = 3.0
"""Size of a weight over that of torch's own initialisation, or its inverse, from which it is called unusual."""
MOST_LINES: Final = 20_000
RATE_POWERS: Final = 4
"""By how many powers of ten the learning rate is raised and lowered at most."""


@dataclass(frozen=True, slots=True)
class Variation:
    """One thing that is changed before the batch is fitted."""

    name: str
    settings: dict[str, float | None] = field(default_factory=dict)
    """Of the optimizer."""
    prepare: Callable[[Subject], dict[int, Tensor]] | None = None
    """Returns values to use instead of those of the tape."""
    dropout: bool = True
    new_weights: bool = False
    """Whether to begin with weights drawn as torch's layers draw them."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The losses of a fit."""

    losses: tuple[float, ...]

    @property
    def end(self) -> float:
        """The median of the last losses; not a number if one is not finite."""
        last = sorted(self.losses[-5:])
        return math.nan if not all(map(math.isfinite, self.losses)) else last[len(last) // 2]

    def steps_to(self, level: float) -> float | None:
        """Return after how many steps the loss was at or below a level for the first time, or None."""
        return next((float(at) for at, loss in enumerate(self.losses) if loss <= level), None)


def learnability(subject: Subject) -> Measured:
    """Train on the taped batch alone, as the program does and with one thing changed at a time.

    A fit is rated by its skill: 0 is the best answer that ignores the inputs, 1 the lowest loss that any outputs can
    reach, as *free outputs* measures both. If the batch is fitted as it is, nothing is changed. Training may have
    ruined the weights by now, so that no single change can help: if new weights alone do not either, all other changes
    are tried from new weights.
    """
    bench = _Bench(subject)
    bench.try_out(Variation("as is"))
    if not bench.has_learnt("as is"):
        bench.try_out(Variation("fresh optimizer state", {"fresh": 1.0}))
        bench.try_out(Variation(NEW_WEIGHTS, {"fresh": 1.0}, new_weights=True))
        if not bench.has_learnt(NEW_WEIGHTS):
            for variation in _variations(subject):
                bench.try_out(variation)
            for direction in (0.1, 10.0):
                bench.search_rates(direction)
    return Measured(bench.describe(), bench.numbers(), _words(subject))


class _Bench:
    """Fits the batch again and again, with one thing changed each time."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.scale = subject, subject.scale
        began = time.process_time()
        first = fit(subject, Variation("as is"), 5)
        self.seconds = (time.process_time() - began) / max(1, len(first.losses))
        fair_share = 0.8 * subject.left() / max(self.seconds, 1e-5) / 14
        self.steps = int(min(STEPS, max(LEAST_STEPS, fair_share)))
        self.fits: dict[str, Fit] = {}

    def try_out(self, variation: Variation) -> None:
        """Fit the batch with one thing changed, if there is time for it."""
        if self.subject.left() < self.seconds * self.steps:
            return
        try:
            self.fits[variation.name] = fit(self.subject, variation, self.steps)
        except CannotRepeat:
            if variation.name == "as is":
                raise

    def skill(self, name: str) -> float | None:
        """Return the skill of a fit; None if it was not made or cannot be rated."""
        return self.scale.skill(self.fits[name].end) if name in self.fits else None

    def has_learnt(self, name: str) -> bool:
        """Return whether a fit has learnt the batch."""
        skill = self.skill(name)
        return skill is not None and skill >= LEARNT

    def search_rates(self, direction: float) -> None:
        """Multiply the learning rate by a power of ten after the other, until the batch is fitted or diverges."""
        for power in range(1, RATE_POWERS + 1):
            name = f"learning rate x {direction**power:g}"
            self.try_out(_from_new_weights(name, lr_factor=direction**power))
            skill = self.skill(name)
            if skill is None or skill >= LEARNT or (direction > 1 and not math.isfinite(skill)):
                return

    def numbers(self) -> dict[str, float | None]:
        """Return losses and skills of all fits."""
        scale = self.scale
        found: dict[str, float | None] = {"steps": float(self.steps), "guess": scale.guess, "floor": scale.floor}
        for name, done in self.fits.items():
            found[f"start.{name}"], found[f"end.{name}"] = done.losses[0], done.end
            found[f"skill.{name}"] = scale.skill(done.end)
            found[f"steps_to_learn.{name}"] = done.steps_to(scale.level(LEARNT))
        return found

    def describe(self) -> str:
        """Return the outcome in a sentence."""
        own, skill = self.fits["as is"], self.skill("as is")
        summary = f"as it is trained, the loss of this batch goes from {own.losses[0]:.4g} to {own.end:.4g}"
        learnt = [name for name in self.fits if name != "as is" and (self.skill(name) or 0) >= LEARNT]
        if learnt and (skill is None or skill < LEARNT):
            summary += "".join(f"; with {name} to {self.fits[name].end:.4g}" for name in learnt)
        return summary


def fit(subject: Subject, variation: Variation, steps: int) -> Fit:
    """Train on the taped batch alone, with one thing changed."""
    program = subject.program
    world = program.world()
    torch.manual_seed(0)
    if variation.new_weights:
        _draw_weights(subject, world)
    values = variation.prepare(subject) if variation.prepare is not None else {}
    optimizer = Rebuilt(program, world, **variation.settings)
    change = Change(values=values, dropout=variation.dropout, redraw=True)
    losses: list[float] = []
    for _ in range(steps + 1):
        done = program.repeat(world, change, keep_buffers=True)
        losses.append(float(done.loss.detach()))
        if not math.isfinite(losses[-1]) or subject.left() < 0:
            break
        if not values and len(losses) > 5 and max(losses[-5:]) < subject.scale.level(0.9):
            break
        for name, gradient in program.gradients(world, done).items():
            world.parameters[name].grad = gradient
        optimizer.step()
    return Fit(tuple(losses))


# ------------------------------------------------------------------ what is changed


def _variations(subject: Subject) -> list[Variation]:
    """Return the changes that make sense for the step, likely ones first."""
    settings = _settings(subject)
    found = []
    if any(subject.exact.values[each].is_floating_point() for each in subject.model_inputs):
        found.append(_from_new_weights("standardised inputs", prepare=_standard_inputs))
    if any(subject.exact.values[each].is_floating_point() for each in subject.targets):
        found.append(_from_new_weights("standardised targets", prepare=_standard_targets))
    if subject.program.has_dropout:
        found.append(_from_new_weights("no dropout", dropout=False))
    if settings.get("weight_decay"):
        found.append(_from_new_weights("no weight decay", weight_decay=0.0))
    if clips(subject.tape):
        found.append(_from_new_weights("no clipping", clip=0.0))
    if settings.get("momentum", 0) > 0.9:
        found.append(_from_new_weights("momentum 0.9", momentum=0.9))
    if settings.get("eps", 1e-8) > 1e-7:
        found.append(_from_new_weights("eps 1e-8", eps=1e-8))
    return found


def _from_new_weights(
    name: str,
    *,
    prepare: Callable[[Subject], dict[int, Tensor]] | None = None,
    dropout: bool = True,
    **settings: float | None,
) -> Variation:
    return Variation(name, {"fresh": 1.0, **settings}, prepare, dropout=dropout, new_weights=True)


def _settings(subject: Subject) -> dict[str, float]:
    groups = [group.settings for info in subject.tape.optimizers for group in info.groups]
    names = {name for group in groups for name, value in group.items() if isinstance(value, int | float)}
    return {name: max(float(group.get(name, 0) or 0) for group in groups) for name in names}


def _words(subject: Subject) -> dict[str, str]:
    settings = _settings(subject)
    words: dict[str, str] = {
        name: f"{settings[name]:g}" for name in ("lr", "weight_decay", "momentum", "eps") if name in settings
    }
    words["rate"] = f"{settings.get('lr') or INSTEAD_OF_ZERO:g}"
    words["odd_weights"] = ", ".join(_odd_weights(subject)[:3])
    words["optimizer_line"] = _optimizer_line(subject)
    return words


def _odd_weights(subject: Subject) -> list[str]:
    """Return the weights whose size is far from that of torch's own initialisation, the farthest first."""
    own, usual = subject.program.world(), subject.program.world()
    _draw_weights(subject, usual)
    apart = {}
    for name, value in own.parameters.items():
        sizes = [float(each.detach().square().mean().sqrt()) for each in (value, usual.parameters[name])]
        if value.dim() >= 2 and sizes[1] > 0:
            apart[name] = abs(math.log(max(sizes[0], 1e-12) / sizes[1]))
    return [name for name in sorted(apart, key=lambda name: -apart[name]) if apart[name] > math.log(ODD)]


def _optimizer_line(subject: Subject) -> str:
    """Return the only line in the program's files that makes an optimizer of the taped class, with its place."""
    kind = subject.tape.optimizers[0].kind.rpartition(".")[2]
    found = []
    for file in dict.fromkeys(line.file for line in subject.tape.lines):
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace") if file.endswith(".py") else ""
        except OSError:
            continue
        for number, line in enumerate(text.splitlines()[:MOST_LINES], 1):
            if f"{kind}(" in line and "lr" in line and not line.lstrip().startswith(("#", "class ")):
                found.append(f"{Path(file).name}:{number}: {line.strip()}")
    return found[0] if len(found) == 1 else ""


def _standard_inputs(subject: Subject) -> dict[int, Tensor]:
    """Standardise each feature of real-valued inputs over the batch; images by channel."""
    changed = {}
    for each in subject.model_inputs:
        value, dtype = subject.exact.values[each].detach(), subject.content(each).dtype
        if value.is_floating_point() and value.dim() >= 2:
            dims = [0, *range(2, value.dim())] if value.dim() >= 4 else list(range(value.dim() - 1))
            spread = value.std(dims, keepdim=True, correction=0)
            changed[each] = ((value - value.mean(dims, keepdim=True)) / spread.clamp(min=1e-6)).to(dtype)
    if not changed:
        raise CannotRepeat("no real-valued inputs")
    return changed


def _standard_targets(subject: Subject) -> dict[int, Tensor]:
    changed = {}
    for each in subject.targets:
        value = subject.content(each)
        if value.is_floating_point():
            changed[each] = (value - value.mean()) / value.std(correction=0).clamp(min=1e-6)
    return changed


def _draw_weights(subject: Subject, world: World) -> None:
    """Draw parameters anew as torch's layers do, by the class of their layer and their shape."""
    kinds = {module.path: module for module in subject.tape.modules}
    with torch.no_grad():
        for name, value in world.parameters.items():
            owner, _, own = name.rpartition(".")
            _draw(value, own, kinds.get(owner), world, owner)


def _draw(value: Tensor, name: str, module: ModuleInfo | None, world: World, owner: str) -> None:
    kind = "" if module is None else module.kind
    if "Norm" in kind:
        value.fill_(1.0 if name == "weight" else 0.0)
    elif "Embedding" in kind:
        value.normal_()
    elif value.dim() >= 2:
        fan_in = value[0].numel()
        value.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
    elif "bias" in name:
        weight = world.parameters.get(f"{owner}.weight" if owner else "weight")
        bound = 1 / math.sqrt(weight[0].numel()) if weight is not None and weight.dim() >= 2 else 0.0
        value.uniform_(-bound, bound)
