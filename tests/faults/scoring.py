"""How well somebody told what ails the programs: pure functions over what was said.

Only warnings and worse count. A cause is right if it is the program's fault or an equivalent one; a place is right if a
right cause names a culprit at or inside one of the program's places.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fault_programs.registry import Program

SAME_PLACE = {"(loss)": "loss_fn", **dict.fromkeys(("(data)", "(input)", "(inputs)", "(loader)"), "loader")}
"""Other names of a place. Where the data comes from is one: authors and findings call it by several."""
HELPERS = ("optimizer", "loader", "scheduler", "scaler", "loss_fn")


@dataclass(frozen=True)
class Said:
    """One thing that was said of a run, with the step at which it was said."""

    kind: str
    sites: tuple[str, ...] = ()
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was said of one run of one program, best first, without mere information."""

    program: Program
    fixed: bool
    seed: int = 0
    said: tuple[Said, ...] = ()
    seconds: float = math.nan
    bare_seconds: float = math.nan
    steps: int = 0
    trouble: tuple[str, ...] = ()
    """Faults of the one who watched."""

    @property
    def ill(self) -> bool:
        return self.program.kind is not None and not self.fixed

    def hit(self, among: int | None = None) -> Said | None:
        """Return the first right cause among so many first ones."""
        right = {self.program.kind, *self.program.also}
        return next((said for said in self.said[:among] if said.kind in right), None)

    @property
    def alarm(self) -> bool:
        return bool(self.said)

    @property
    def expected_only(self) -> bool:
        """Whether nothing was said beyond the fault and what it brings about."""
        known = (self.program.kind or "", *self.program.also, *self.program.cascade)
        nan = any(kind.startswith("nan_") for kind in known)  # whoever may bring one NaN may bring them all
        return all(said.kind in known or (nan and said.kind.startswith("nan_")) for said in self.said)

    @property
    def located(self) -> bool | None:
        """Whether the place is right; None if the fault has none."""
        if not self.program.sites:
            return None
        right = {self.program.kind, *self.program.also}
        found = [site for said in self.said[:3] if said.kind in right for site in said.sites]
        return any(is_at(site, place) for site in found for place in self.program.sites)

    @property
    def latency(self) -> int | None:
        """Steps from the fault's onset to the first right cause; None if there was none."""
        hit = self.hit(among=3)
        return None if hit is None else max(0, hit.step - self.program.onset)


def is_at(site: str, place: str) -> bool:
    """Return whether a culprit lies at a place or inside it; `fc` stands for `fc1` and `fc2` too.

    >>> is_at("encoder.0.weight", "encoder"), is_at("encoder", "encoder.0"), is_at("optimizer2", "optimizer")
    (True, False, True)
    >>> is_at("loss_fn", "(loss)"), is_at("loader", "(data)"), is_at("(validation)", "(data)")
    (True, True, False)
    """
    site, place = SAME_PLACE.get(site, site), SAME_PLACE.get(place, place)
    if site == place or site.startswith(place + "."):
        return True
    return bool(re.fullmatch(rf"{re.escape(place)}\d+(\..*)?", site))


@dataclass
class Score:
    """The figures of a set of verdicts."""

    faults: int = 0
    clean: int = 0
    top1: float = math.nan
    top3: float = math.nan
    named: float = math.nan
    """The cause is anywhere in what was said."""
    alarms: float = math.nan
    located: float = math.nan
    clean_alarms: float = math.nan
    precision: float = math.nan
    latency: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Median and 90th percentile in steps, for exact relations and for statistics."""
    slowdown: float = math.nan


def score(verdicts: Iterable[Verdict]) -> Score:
    """Sum up verdicts."""
    verdicts = list(verdicts)
    ill = [verdict for verdict in verdicts if verdict.ill]
    clean = [verdict for verdict in verdicts if not verdict.ill]
    places = [verdict.located for verdict in ill if verdict.located is not None]
    hits = sum(verdict.hit(among=3) is not None for verdict in ill)
    spurious = sum(not verdict.expected_only for verdict in ill) + sum(verdict.alarm for verdict in clean)
    return Score(
        faults=len(ill),
        clean=len(clean),
        top1=_share(ill, lambda verdict: verdict.hit(among=1) is not None),
        top3=hits / len(ill) if ill else math.nan,
        named=_share(ill, lambda verdict: verdict.hit() is not None),
        alarms=_share(ill, lambda verdict: verdict.alarm),
        located=sum(places) / len(places) if places else math.nan,
        clean_alarms=_share(clean, lambda verdict: verdict.alarm),
        precision=hits / (hits + spurious) if hits + spurious else math.nan,
        latency={
            name: (quantile(found, 0.5), quantile(found, 0.9))
            for name, exact in (("exact", True), ("statistical", False))
            if (found := [v.latency for v in ill if v.program.exact == exact and v.latency is not None])
        },
        slowdown=quantile([v.seconds / v.bare_seconds for v in verdicts if v.bare_seconds > 0], 0.5),
    )


def by_set(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Group verdicts by the set their programs belong to: `dev` first, then each held-out set."""
    sets: dict[str, list[Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda given: given.program.set):
        sets.setdefault(verdict.program.set, []).append(verdict)
    return sets


def quantile(values: list[float] | list[int], q: float) -> float:
    """Return the nearest-rank quantile.

    >>> quantile([1, 2, 3, 100], 0.5), quantile([1, 2, 3, 100], 0.9)
    (2, 100)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def _share(verdicts: list[Verdict], holds: Callable[[Verdict], bool]) -> float:
    return sum(map(holds, verdicts)) / len(verdicts) if verdicts else math.nan
