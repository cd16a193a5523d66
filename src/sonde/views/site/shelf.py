"""Where answers are filed: one file for those that are asked together, and an index of all of them."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sonde.views.site.ask import Answer
from sonde.views.site.limits import Limits


@dataclass(slots=True)
class Written:
    """What a copy holds."""

    answers: int = 0
    nbytes: int = 0
    left_out: list[str] = field(default_factory=list)


class Shelf:
    """Files answers: each in a group, one file a group, all of it bounded."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self.limits = folder, limits
        self._index: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._total = 0
        self.without_room = 0
        self.done = Written()

    def put(self, group: str, question: str, answer: Answer) -> None:
        """File an answer, unless it is there already or too large."""
        if question in self._index:
            return
        is_text = answer.kind.startswith("application/json")
        said = answer.body.decode() if is_text else base64.b64encode(answer.body).decode()
        headers = json.dumps({"Content-Type": answer.kind} | answer.headers)
        # As a string in any case: a name such as __proto__ means something in the text of a script.
        line = f"sondeCopy.put({json.dumps(question)}, {json.dumps(headers)}, {json.dumps(said)});\n"
        if len(answer.body) > self.limits.answer_bytes or self._total + len(line) > self.limits.total_bytes:
            self.without_room += 1
            return
        number = self._groups.setdefault(group, len(self._groups))
        with (self._folder / f"{number}.js").open("a", encoding="utf-8") as file:
            file.write(line)
        self._index[question] = number
        self._total += len(line)
        self.done.answers += 1

    def close(self, about: dict[str, Any]) -> None:
        """Write the index: which question is answered in which file, and what the copy says of itself."""
        if self.without_room:
            answers = "answer" if self.without_room == 1 else "answers"
            about["left_out"].append(f"{self.without_room:,} {answers} had no room in this copy.")
        parts = {"about": json.dumps(about), "index": json.dumps(list(self._index.items()))}
        text = ", ".join(f"{name}: {json.dumps(value)}" for name, value in parts.items())
        (self._folder / "index.js").write_text(f"window.sondeCopy = {{ {text} }};\n", "utf-8")
