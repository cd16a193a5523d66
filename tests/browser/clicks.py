"""How many clicks docs/ten-questions.md promises for each question."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "ten-questions.md"
_ROW = re.compile(r"^\| (\d+) \| (.+?) \| (\d+) \|", re.MULTILINE)


def promised() -> dict[int, int]:
    """Return the number of clicks that the page in docs promises for each question."""
    return {int(number): int(clicks) for number, _, clicks in _ROW.findall(_PAGE.read_text("utf-8"))}
