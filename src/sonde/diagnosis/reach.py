"""Which parameters the backward pass never reached, though their own optimizer stepped."""

from __future__ import annotations

from dataclasses import dataclass

from sonde import vitals
from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import held, need_optimizers, own_steps, runner_of


@dataclass(frozen=True, slots=True)
class Unreached:
    """Trainable, owned parameters that never had a gradient, and the modules of which some parameter had one."""

    names: tuple[str, ...]
    steps: dict[str, int]
    """By parameter: in how many of the last steps its optimizer stepped."""
    live: frozenset[str]
    """Modules with a parameter of their own, or below them, that had a gradient."""
    first_step: int

    def has_live_kin(self, case: Case, name: str) -> bool:
        """Say whether another parameter of the same module had a gradient: then the module is not cut off."""
        return runner_of(case, name) in self.live


def unreached(case: Case) -> Unreached:
    """Return what the backward pass never reached.

    Raises:
        NotMeasured: Optimizers or updates are not known.

    """
    return case.once("unreached", lambda: _find(case))


def _find(case: Case) -> Unreached:
    steps = own_steps(case)
    reached = {site.name for site in case.sites("gradient")}
    names = []
    for optimizer in need_optimizers(case):
        mine = [name for name in held(optimizer) if name in case.parameters and case.parameters[name].trainable]
        # If none at all has a gradient though backward passes reached them, the loop is at fault and not the graph.
        if any(name in reached for name in mine) or _is_never_reached(case, optimizer.name):
            names += [name for name in mine if name not in reached and steps.get(name, 0) > 0]
    live: set[str] = set()
    for name in reached:
        module = runner_of(case, name)
        while module not in live:
            live.add(module)
            module = module.rpartition(".")[0] or "(model)"
    first = int(case.history.first_step or 0)
    return Unreached(tuple(dict.fromkeys(names)), steps, frozenset(live), max(first, 1))


def _is_never_reached(case: Case, optimizer: str) -> bool:
    backwards = case.vital(optimizer, vitals.BACKWARDS_SEEN)
    return backwards is not None and not backwards.numbers().any()
