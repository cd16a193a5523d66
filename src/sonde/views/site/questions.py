"""What the pages of the viewer ask, and so what a copy answers.

The pages decide what is asked; a browser test opens every page of a copy and fails if one asks what is not here.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sonde.views.site.ask import Answer, Asker, Words, spell
from sonde.views.site.shelf import Shelf

_FIGURES: Final = ("metrics", "flow", "flow-over-time", "ratio", "phases", "memory", "timeline")


def ask_all(asker: Asker, run: str, shelf: Shelf) -> None:
    """Ask what the pages ask about a run, and file the answers."""
    from sonde.views.site.layer_questions import ask_layers
    from sonde.views.site.sample_questions import ask_samples

    ask = Questions(asker, run, shelf)
    ask.say("A copy shows no more than this; what was written to the run later is not in it.")
    ask("runs", {}, of_run=False)
    ask("themes", {}, of_run=False)
    overview = ask("", {}) or {}
    for path in ("card", "pulse", "events"):
        ask(path, {})
    for name in _FIGURES:
        ask(f"figure/{name}", {})
    _ask_profile(ask)
    ask_layers(ask, overview)
    ask_samples(ask)


def _ask_profile(ask: Questions) -> None:
    traces = (ask("traces", {}) or {}).get("traces", [])
    for trace in traces:
        ask("trace-summary", {"name": trace["name"]})
    if traces:
        ask.say("Traces are summed up here; the traces themselves are in the run.")


class Questions:
    """Asks about one run, and files what is answered."""

    def __init__(self, asker: Asker, run: str, shelf: Shelf) -> None:
        self._asker, self.run, self.shelf = asker, run, shelf

    @property
    def limits(self) -> Any:
        """How much the copy may hold."""
        return self.shelf.limits

    def __call__(self, path: str, words: Words, *, group: str | None = None, of_run: bool = True) -> Any:
        """Ask, file the answer, and return it if it is JSON; None where there is none."""
        whole = self._whole(path) if of_run else path
        question = spell(whole, words)
        answer = self._asker.ask(whole, words)
        if answer.status != 200:
            return None
        self.shelf.put(group or question, question, answer)
        return answer.json()

    def look(self, path: str, words: Words) -> Any:
        """Ask without filing the answer."""
        return self._asker.ask(self._whole(path), words).json()

    def put(self, path: str, words: Words, value: Any) -> None:
        """File an answer that is narrower than the server's, so that the pages offer only what is here."""
        question = spell(self._whole(path), words)
        body = json.dumps(value, allow_nan=False).encode()
        self.shelf.put(question, question, Answer(200, "application/json", body))

    def say(self, line: str) -> None:
        """Say in the copy what it leaves out."""
        self.shelf.done.left_out.append(line)

    def _whole(self, path: str) -> str:
        return f"run/{self.run}{'/' + path if path else ''}"
