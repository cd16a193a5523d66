"""How much of a run a copy holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a copy. All of it is said in the copy itself."""

    sites: int = 200
    """Sites that can be looked at one by one: those that findings name, then the worst."""
    steps: int = 40
    """Steps at which gradients can be seen by depth."""
    evaluations: int = 8
    """Evaluations, the last ones."""
    samples: int = 24
    """Samples with their captures, in all of these evaluations: the worst by each metric."""
    answer_bytes: int = 24 << 20
    """One answer of the server; a larger one is left out."""
    total_bytes: int = 400 << 20
    """All answers together."""
