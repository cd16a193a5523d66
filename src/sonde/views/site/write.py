"""Writing the copy: the front end as one script, Plotly's script, and a file for each group of answers."""

from __future__ import annotations

import base64
import json
import secrets
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from sonde.errors import MissingExtra, OptionError
from sonde.views.figures.theme import plotly_js
from sonde.views.site.ask import Answer
from sonde.views.web.bundle import bundle_viewer, read_page, read_sources

# --------------------------------------------------------------------------------
# How much of a run a copy holds.


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
    """Samples with all that was captured of them, in all of these evaluations: the worst by each metric."""
    answer_bytes: int = 24 << 20
    """One answer of the server; a larger one is left out."""
    total_bytes: int = 400 << 20
    """All answers together."""


# --------------------------------------------------------------------------------
# Where answers are filed: one file for those that are asked together, and an index of all of them.


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


# --------------------------------------------------------------------------------


MARK: Final = "sonde-site.json"
_SCRIPTS: Final = "\n".join(
    (
        '<link rel="stylesheet" href="assets/copy.css">',
        '<script defer src="data/index.js"></script>',
        '<script defer src="assets/copy.js"></script>',
        '<script defer src="assets/viewer.js"></script>',
    )
)
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def write_site(
    path: str | Path, out: str | Path, *, limits: Limits | None = None, clock: Callable[[], float] = time.time
) -> Written:
    """Write a run into a folder that shows the viewer without a server.

    Args:
        path: The run.
        out: The folder; made if it is not there. A copy that is there is replaced.
        limits: How much of the run it holds.
        clock: Tells the time that the copy names.

    Raises:
        OptionError: The folder holds something else.
        RunNotFound: There is no run at the path.
        MissingExtra: Starlette or plotly is not installed.

    """
    run, target = Path(path).resolve(), Path(out)
    app, token, listed = _serve(run)
    check_folder(target)
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _write_front_end(unfinished)
        shelf = Shelf(unfinished / "data", limits or Limits())
        _answer(app, token, listed.id, shelf)
        shelf.close(_about(listed.name, run, shelf.done, clock()))
        (unfinished / MARK).write_text(json.dumps({"run": listed.name, "answers": shelf.done.answers}) + "\n", "utf-8")
        shutil.rmtree(target, ignore_errors=True)
        unfinished.replace(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    shelf.done.nbytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return shelf.done


def _serve(run: Path) -> tuple[Any, str, Any]:
    try:
        from sonde.views.web.app import make_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "anyio", "uvicorn"):
            raise
        raise MissingExtra(error.name or "starlette", "view", "Writing a site") from None
    from sonde.store import open_run

    open_run(run)  # says what is wrong with it, if it cannot be read
    token = secrets.token_urlsafe(24)
    app = make_app([run], token=token)
    return app, token, next(each for each in app.state.library.list() if each.summary.path == run)


def _answer(app: Any, token: str, run_id: str, shelf: Shelf) -> None:
    from sonde.views.site.ask import Asker
    from sonde.views.site.questions import ask_all

    with Asker(app, token) as asker:
        ask_all(asker, run_id, shelf)


def check_folder(out: Path) -> None:
    """Refuse a folder that holds anything but an earlier copy.

    Raises:
        OptionError: It does, or it is a file.

    """
    if out.is_file():
        raise OptionError(f"{out} is a file; --out names a folder.")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).is_file():
        raise OptionError(f"{out} holds other files and will not be touched. Name a new folder with --out.")
    out.parent.mkdir(parents=True, exist_ok=True)


def _write_front_end(out: Path) -> None:
    (out / "assets").mkdir(parents=True)
    (out / "data").mkdir()
    (out / "assets" / "viewer.js").write_text(bundle_viewer(), "utf-8")
    for name, text in read_sources().items():
        if not name.endswith(".js"):
            _write(out / "assets" / name, text)
    for name, text in read_sources(files("sonde.views.site") / "assets").items():
        _write(out / "assets" / name, text)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    page = read_page(_SCRIPTS).replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}')
    (out / "index.html").write_text(page, "utf-8")
    (out / "plotly.js").write_text(plotly_js(), "utf-8")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def _about(name: str, run: Path, done: Written, now: float) -> dict[str, Any]:
    return {
        "name": name,
        "made": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "left_out": done.left_out,
        "command": f"sonde view {shlex.quote(run.name)}",
    }
