"""Where vital signs are written: the recorder, spoken to by subject and name."""

from __future__ import annotations

from torch import Tensor

from sonde.records import Phase
from sonde.stats.protocol import Recorder
from sonde.vitals import part_of


class VitalSites:
    """Names the sites of vital signs and hands their values to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._sites: dict[tuple[str, str, Phase, int], int] = {}

    def put(self, subject: str, name: str, value: float, *, phase: Phase = "train", call: int = 0) -> None:
        """Write a plain number."""
        self.recorder.put(self._site(subject, name, phase, call, None), float(value))

    def see(self, subject: str, name: str, values: Tensor, *, phase: Phase = "train", call: int = 0) -> None:
        """Write numbers that are still on their device."""
        self.recorder.see(self._site(subject, name, phase, call, values), values)

    def _site(self, subject: str, name: str, phase: Phase, call: int, values: Tensor | None) -> int:
        key = (subject, name, phase, call)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self.recorder.site(
                subject, "vital", phase=phase, call=call, part=part_of(name), tensor=values
            )
        return site
