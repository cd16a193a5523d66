"""How much of a run a copy holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a copy. All of it is said in the copy itself."""

    sites: int = 200
    """Sites that can be looked at one by one: those that findings name, then the worst."""
    samples: int = 24
    """Samples of each evaluation with their captures, the worst first."""
    answer_bytes: int = 24 << 20
    """One answer of the server; a larger one is left out."""
    total_bytes: int = 400 << 20
    """All answers together."""
