"""Writing the copy: the front end as one script, Plotly's script, and a file for each group of answers."""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from sonde.errors import MissingExtra, OptionError
from sonde.views.figures.library import plotly_js
from sonde.views.site.bundle import bundle
from sonde.views.site.limits import Limits
from sonde.views.site.shelf import Shelf, Written

MARK: Final = "sonde-site.json"
_MODULE: Final = '<script type="module" src="assets/main.js"></script>'
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
    web, own = files("sonde.views.web") / "assets", files("sonde.views.site") / "assets"
    (out / "assets").mkdir(parents=True)
    (out / "data").mkdir()
    sources = {name: text for name, text in _tree(web) if name.endswith(".js")}
    (out / "assets" / "viewer.js").write_text(bundle(sources, "main.js"), "utf-8")
    for name, text in _tree(web):
        if name.endswith((".css", ".svg")):
            _write(out / "assets" / name, text)
    for name, text in _tree(own):
        _write(out / "assets" / name, text)
    page = (web / "index.html").read_text("utf-8")
    if _MODULE not in page:
        raise OptionError(f"index.html of the viewer does not load its script by {_MODULE}; it cannot be copied.")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}').replace(_MODULE, _SCRIPTS)
    (out / "index.html").write_text(page, "utf-8")
    (out / "plotly.js").write_text(plotly_js(), "utf-8")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def _tree(folder: Any, before: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for each in sorted(folder.iterdir(), key=lambda one: one.name):
        if each.is_dir():
            found += _tree(each, f"{before}{each.name}/")
        elif each.name.endswith((".js", ".css", ".svg")):
            found.append((f"{before}{each.name}", each.read_text("utf-8")))
    return found


def _about(name: str, run: Path, done: Written, now: float) -> dict[str, Any]:
    return {
        "name": name,
        "made": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "left_out": done.left_out,
        "command": f"sonde view {shlex.quote(run.name)}",
    }
