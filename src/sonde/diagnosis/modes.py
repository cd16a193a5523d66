"""In which mode modules ran, and since when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sonde import vitals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.records import Phase

NORMS: Final = ("BatchNorm", "SyncBatchNorm", "InstanceNorm")


@dataclass(frozen=True, slots=True)
class Mode:
    """A module that behaves differently in training, in the mode it ran in last."""

    name: str
    kind: str
    training: float
    """1 if it was in training mode, 0 if not, something between if it was both within a step."""
    since: int
    """The step from which on it was so."""
    root: float | None
    """The same of the model it belongs to."""

    @property
    def is_norm(self) -> bool:
        """Whether it normalises by the batch or by what it remembers."""
        return self.kind.startswith(NORMS)


def modes(case: Case, phase: Phase) -> list[Mode]:
    """Return the mode of all modules that care, which ran in a phase.

    Raises:
        NotMeasured: No module's mode is known.

    """
    part = vitals.part_of(vitals.TRAINING)
    sites = [site for site in (*case.sites("vital"), *case.sites("vital", "eval")) if site.part == part]
    if not sites:
        raise NotMeasured("modes of modules")
    known: dict[str, tuple[float, int]] = {}
    for site in sites:
        curve = case.curve(site.key) if site.phase == phase else None
        if curve is not None:
            steps, values = curve
            held = len(values) - 1
            while held > 0 and values[held - 1] == values[-1]:
                held -= 1
            known[site.name] = (float(values[-1]), int(steps[held]))
    roots = {name for name in known if not _cares(case, name)}
    return [
        Mode(name, case.modules[name].kind, training, since, _root_of(name, roots, known))
        for name, (training, since) in known.items()
        if name not in roots
    ]


def _cares(case: Case, name: str) -> bool:
    module = case.modules.get(name)
    if module is None:
        return False
    if "Dropout" in module.kind:
        return bool(module.settings.get("p", 1))
    # Without a memory of its own a norm does the same in both modes.
    return module.kind.startswith(NORMS) and module.settings.get("track_running_stats", True) is not False


def _root_of(name: str, roots: set[str], known: dict[str, tuple[float, int]]) -> float | None:
    own = [root for root in roots if root == "(model)" or name.startswith(f"{root}.")]
    return known[max(own, key=len)][0] if own else None
