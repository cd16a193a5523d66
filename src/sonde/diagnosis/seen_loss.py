"""The loss functions that the program called, each with its input, target and result."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.core import signals
from sonde.core.facts import LossFacts
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.track import Track


@dataclass(frozen=True, slots=True, eq=False)
class SeenLoss:
    """One loss of a step; `call` counts those between two backward passes."""

    case: Case
    kind: str
    call: int
    values: Track
    """Its input."""

    @property
    def target(self) -> Track | None:
        """What its input is compared with."""
        return self.case.track(f"{signals.LOSS}:input.target{self._suffix}")

    @property
    def output(self) -> Track | None:
        """What it returned."""
        return self.case.track(f"{signals.LOSS}:output{self._suffix}")

    @property
    def facts(self) -> LossFacts | None:
        """How it was called."""
        return self.case.loss_facts(self.kind)

    def vital(self, name: str) -> Track | None:
        """Return a vital sign of it."""
        return self.case.track(f"{signals.LOSS}:vital{signals.part_of(name)}{self._suffix}")

    @property
    def _suffix(self) -> str:
        return f"#{self.call}" if self.call else ""


def seen_losses(case: Case, *kinds: str) -> list[SeenLoss]:
    """Return the losses of some kinds; any, if none is given.

    Raises:
        NotMeasured: No loss function of torch was seen at all.

    """
    seen = case.once("losses", lambda: _find(case))
    if not seen:
        raise NotMeasured("a loss function of torch.nn.functional")
    return [loss for loss in seen if not kinds or loss.kind in kinds]


def _find(case: Case) -> list[SeenLoss]:
    sites = [site for site in case.sites("input") if site.name == signals.LOSS and site.part == ".input"]
    tracks = ((site, case.track(site.key)) for site in sites)
    return [SeenLoss(case, site.kind, site.call, track) for site, track in tracks if track is not None]
