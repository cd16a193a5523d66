"""What programs after real posts say about themselves beyond the registry: source, cause, accepted words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_programs import registry


class Sources:
    """The programs of one set.

    Args:
        measured: A file with the illness of each program with the fault and repaired (or of the healthy program),
            unwatched, for seeds 0 and 1; `well` and `ill` derive from it.

    """

    def __init__(self, measured: Path) -> None:
        self.about: dict[str, dict[str, Any]] = {}
        """By program: area, source, cause (a plain sentence), words (regular expressions that name the cause)."""
        self._measured: dict[str, dict[str, list[float]]] = json.loads(measured.read_text())

    def fault(
        self, kind: str, *, area: str, source: str, cause: str, words: tuple[str, ...], **about: Any
    ) -> Callable[..., Any]:
        """Register a program with a fault, with its source, its cause in words and what counts as naming it."""

        def register(train: Callable[..., float]) -> Callable[..., float]:
            name = train.__name__
            self.about[name] = {"area": area, "source": source, "cause": cause, "words": words}
            usual = {"arch": area, "task": area, "group": "B"}
            return registry.fault(kind, **usual | self._limits(name) | about)(train)

        return register

    def healthy(self, *, area: str, source: str, **about: Any) -> Callable[..., Any]:
        """Register a program in which nothing is wrong."""

        def register(train: Callable[..., float]) -> Callable[..., float]:
            name = train.__name__
            self.about[name] = {"area": area, "source": source, "cause": "", "words": ()}
            limits = self._limits(name)
            limits.pop("ill", None)
            usual = {"arch": area, "task": area, "group": "healthy", "deceptive": True}
            return registry.healthy(**usual | limits | about)(train)

        return register

    def _limits(self, name: str) -> dict[str, float]:
        seen = self._measured.get(name)
        if not seen:
            return {"well": 0.0, "ill": 1.0}
        well = max(seen["well"])
        if "ill" not in seen:
            return {"well": well + 0.25 * abs(well) + 1e-6}
        ill = min(min(seen["ill"]), 1e9)
        gap = ill - well
        return {"well": well + 0.3 * gap, "ill": ill - 0.3 * gap}
