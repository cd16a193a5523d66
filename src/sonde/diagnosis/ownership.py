"""Look up which optimizer holds a parameter, how it steps, and which module the parameter belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Final

import numpy as np

from sonde.core import signals
from sonde.core.facts import OptimizerFacts, ParameterFacts
from sonde.diagnosis.case import Case, NotMeasured

MODEL: Final = "(model)"
# Modules that only hold parameters for their parent, or whose parts are used without being called.
_KEEPERS: Final = ("ParameterList", "ParameterDict", "ParametrizationList")
_CALLS_NO_PARTS: Final = ("MultiheadAttention",)


def module_of(parameter: str) -> str:
    """Return the name of the module that a parameter belongs to."""
    return parameter.rpartition(".")[0] or MODEL


def size(parameter: ParameterFacts) -> int:
    """Return how many elements a parameter has."""
    return prod(parameter.shape) if parameter.shape else 1


def share_of(case: Case, names: Iterable[str]) -> float:
    """Return the share of all trainable elements that some parameters have."""
    trainable = {name: size(each) for name, each in case.parameters.items() if each.trainable}
    chosen = sum(trainable.get(name, 0) for name in names)
    return chosen / max(1, sum(trainable.values()))


def held(optimizer: OptimizerFacts) -> tuple[str, ...]:
    """Return the names of all watched parameters that an optimizer holds."""
    return tuple(name for group in optimizer.groups for name in group.parameters)


def need_optimizers(case: Case) -> tuple[OptimizerFacts, ...]:
    """Return the optimizers that hold watched parameters.

    Raises:
        NotMeasured: None is known.

    """
    found = tuple(each for each in case.need_facts().optimizers if held(each))
    if not found:
        raise NotMeasured("an optimizer that holds parameters of the model")
    return found


def recent_rates(case: Case, last: int) -> dict[str, float]:
    """Return by parameter the smallest learning rate of its group over the last readings."""
    rates: dict[str, float] = {}
    for optimizer in case.facts.optimizers:
        for index, group in enumerate(optimizer.groups):
            found = case.learning_rate(optimizer.name, index)
            if found is not None:
                rates |= dict.fromkeys(group.parameters, float(np.min(found[1][-last:])))
    return rates


def own_steps(case: Case) -> dict[str, int]:
    """Return by parameter in how many of the last steps its own optimizer stepped.

    Raises:
        NotMeasured: Updates are not recorded.

    """
    panel = case.panel("update")
    if not panel.sites:
        raise NotMeasured("updates")
    return dict(zip(panel.names, panel.read.sum(axis=0).tolist(), strict=True))


def ran(case: Case) -> frozenset[str]:
    """Return the names of modules that ran in a training pass.

    Raises:
        NotMeasured: Nothing is known about modules that ran.

    """
    names = case.once("ran", lambda: _find_ran(case))
    if not names:
        raise NotMeasured("outputs of modules")
    return names


def _find_ran(case: Case) -> frozenset[str]:
    return frozenset({*case.facts.order, *(site.name for site in case.sites("output") if site.name != signals.LOSS)})


def runner_of(case: Case, parameter: str) -> str:
    """Return the module whose call would use a parameter."""
    module = module_of(parameter)
    while module != MODEL and (known := case.modules.get(module)) is not None:
        above = module.rpartition(".")[0] or MODEL
        parent = case.modules.get(above)
        part_of_whole = parent is not None and parent.kind in _CALLS_NO_PARTS
        if known.kind not in _KEEPERS and not part_of_whole:
            break
        module = above
    return module


def marked(case: Case, kind: str, after: str = "") -> str:
    """Return the user's line of the last call of a kind in a taped step, in words: ` (train.py:12: ...)`, or nothing.

    With `after`, a call that comes after the last call of that kind.
    """
    marks = () if case.taped is None else case.taped.tape.marks
    start = max((at for at, mark in enumerate(marks) if mark.kind == after), default=-1)
    called = next((mark for mark in reversed(marks[start + 1 :]) if mark.kind == kind), None)
    return "" if case.taped is None else case.taped.where(called)


def output_module(case: Case) -> str | None:
    """Return the last leaf module with parameters of its own in the first training pass; None if not known."""
    owners = {module_of(name) for name in case.parameters}
    return next((name for name in reversed(case.facts.order) if name in owners), None)


def last_module(case: Case) -> str | None:
    """Return the leaf module that ran last in the first training pass."""
    return next((name for name in reversed(case.facts.order) if name != signals.LOSS), None)
