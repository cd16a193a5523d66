"""What the pages of the viewer ask, and so what a copy answers.

The pages decide what is asked; a browser test opens every page of a copy and fails if one asks what is not here.
"""

from __future__ import annotations

from typing import Any, Final

from sonde.views.site.ask import Asker, Words, spell
from sonde.views.site.write import Shelf

_PLAIN_FIGURES: Final = ("metrics", "flow", "flow-over-time", "ratio", "phases", "memory", "timeline")


def ask_all(asker: Asker, run: str, shelf: Shelf) -> None:
    """Ask what the pages ask about a run, and file the answers."""
    ask = Questions(asker, run, shelf)
    ask("runs", {}, of_run=False)
    ask("themes", {}, of_run=False)
    overview = ask("", {})
    for path in ("card", "pulse", "events", "steps", "traces"):
        ask(path, {})
    for name in _PLAIN_FIGURES:
        ask(f"figure/{name}", {})
    _ask_sites(ask, overview or {})
    ask.left_out.insert(0, "Only what the pages show at first, and what is named here, can be looked at.")
    shelf.done.left_out = ask.left_out


class Questions:
    """Asks about one run, and files what is answered."""

    def __init__(self, asker: Asker, run: str, shelf: Shelf) -> None:
        self._asker, self._run, self.shelf = asker, run, shelf
        self.left_out: list[str] = []

    def __call__(self, path: str, words: Words, *, group: str | None = None, of_run: bool = True) -> Any:
        """Ask, file the answer, and return it if it is JSON; None where there is none."""
        whole = f"run/{self._run}{'/' + path if path else ''}" if of_run else path
        question = spell(whole, words)
        answer = self._asker.ask(whole, words)
        if answer.status != 200:
            return None
        if not self.shelf.has(question):
            self.shelf.put(group or question, question, answer.kind, answer.body)
        return answer.json()


def _ask_sites(ask: Questions, overview: dict[str, Any]) -> None:
    listed = ask("sites", {}) or {"sites": [], "total": 0}
    named = {site for finding in overview.get("findings", []) for site in finding.get("sites", [])}
    sites = sorted(listed["sites"], key=lambda site: not (site["name"] in named or site["key"] in named))
    chosen = sites[: ask.shelf.limits.sites]
    for site in chosen:
        group = f"site {site['key']}"
        ask("site", {"site": site["key"]}, group=group)
        ask("figure/curves", {"site": site["key"], "stat": site["stat"]}, group=group)
        ask("figure/histogram", {"site": site["key"]}, group=group)
    if listed["total"] > len(chosen):
        ask.left_out.append(f"Of {listed['total']:,} sites, {len(chosen):,} can be looked at one by one.")
