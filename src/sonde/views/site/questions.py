"""List the requests that the viewer's pages make, and so what a copy must contain.

Everything that can be asked without parameters is found from the server's routes and figures. What the pages ask
about one site, sample or trace is asked here within the limits of a copy; a browser test opens every page of a copy
and fails if one asks what is not in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from sonde.views.site.ask import Answer, Asker, Words, spell
from sonde.views.site.write import Shelf

if TYPE_CHECKING:
    from starlette.routing import BaseRoute


# --------------------------------------------------------------------------------
# What the page *Layers* asks: the picture of all layers, gradients by depth, the model, and one site at a time.


_MOST_LISTED: Final = 500


def ask_layers(ask: Questions, overview: dict[str, Any]) -> None:
    """Ask what the page shows at first, and what its controls lead to, within limits."""
    table = ask("statistics", {}, of_run=False) or {"statistics": [], "quantities": []}
    stats = ["", *(row["name"] for row in table["statistics"] if row["shown"] == "always")]
    known = [each for each in table["quantities"] if overview.get("quantities", {}).get(each)]
    kept = _ask_steps(ask, known[0] if known else "", stats)
    for quantity in known:
        for stat in stats:
            ask("heat", {"pattern": f"*:{quantity}", "stat": stat})
            for colour in ("findings", "statistic"):
                ask("figure/tree", {"colour": colour, "quantity": quantity, "stat": stat})
    if not known:
        ask("heat", {"pattern": "*"})
        ask("figure/tree", {"colour": "statistic"})
    listed, total = _ask_lists(ask, known)
    shown = _ask_sites(ask, overview, listed, known[0] if known else "gradient")
    ask.say(f"All layers in one picture: each quantity whole, for {len(stats) - 1} statistics.")
    ask.say(f"Gradients by depth, and the model by its usual statistic: at {kept:,} of the steps.")
    if total > shown:
        ask.say(f"Of {total:,} sites, {shown:,} can be looked at one by one.")


def _ask_steps(ask: Questions, quantity: str, stats: list[str]) -> int:
    """Ask for gradients by depth and for the model at some steps, and offer only those."""
    answer = ask.look("steps", {}) or {}
    steps = answer.get("steps", [])
    count = min(len(steps), ask.limits.steps)
    chosen = [steps[round(at * (len(steps) - 1) / max(count - 1, 1))] for at in range(count)]
    ask.put("steps", {}, answer | {"steps": chosen})
    for stat in stats:
        ask("figure/flow", {"stat": stat})
    for step in chosen:
        ask("figure/flow", {"step": step}, group="by step")
        ask("figure/tree", {"colour": "statistic", "quantity": quantity, "step": step}, group="by step")
    return len(chosen)


def _ask_lists(ask: Questions, known: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Ask for the lists of sites; return the sites and how many there are with those that are not listed."""
    sites: list[dict[str, Any]] = []
    total = 0
    for pattern in [f"*:{quantity}" for quantity in known] or ["*"]:
        answer = ask("sites", {"pattern": pattern, "most": _MOST_LISTED}) or {"sites": [], "total": 0}
        sites += answer["sites"]
        total += answer["total"]
    return sites, total


def _ask_sites(ask: Questions, overview: dict[str, Any], listed: list[dict[str, Any]], first: str) -> int:
    findings = overview.get("findings", [])
    # What findings point at comes first, with the statistic they name.
    for item in [item for finding in findings for item in finding.get("evidence", ()) if item.get("site")]:
        _ask_site(ask, item["site"], item["stat"] or "")
        ask("heat", {"pattern": f"*:{first}", "stat": item["stat"] or ""})
    for layer in [finding["layer"] for finding in findings if finding.get("layer")]:
        _ask_site(ask, layer, "")
    named = {site.partition(":")[0] for finding in findings for site in finding.get("sites", ())}
    order = sorted(listed, key=lambda site: not (site["name"] in named or site["layer"] in named))
    chosen = order[: ask.limits.sites]
    for site in chosen:
        _ask_site(ask, site["key"], "")
    return len(chosen)


def _ask_site(ask: Questions, key: str, stat: str) -> None:
    group = f"site {key}"
    about = ask("site", {"site": key, "stat": stat}, group=group)
    if about is None:
        return
    ask("curve", {"site": key, "stat": stat}, group=group)
    if about["quantity"] != "scalar":
        ask("figure/histogram", {"site": key}, group=group)
        ask("figure/histogram", {"site": key, "kind": "signed"}, group=group)
    if about["quantity"] in ("parameter", "state"):
        ask("figure/histogram", {"site": key, "kind": "values"}, group=group)


# --------------------------------------------------------------------------------
# What the pages about samples ask: the scores of all, and a few samples with their captures.


MOST_ELEMENTS: Final = 1 << 20  # of one tensor; the page asks for larger ones a plane at a time
SMALL_ELEMENTS: Final = 1 << 14  # of a tensor that a copy holds for every sample it lists
_MOST_ROWS: Final = 200  # as many as the page lists
_PICTURES: Final = 48  # that the page draws at once
_OVERLAYS: Final = 2  # that can be laid over pictures in a copy
_PERCENTILE: Final = 10  # where its slider is at first


def ask_samples(ask: Questions) -> None:
    """Ask for the scores of the last evaluations, and for their worst samples."""
    answer = ask.look("evaluations", {})
    if not answer:
        return
    scored = [each for each in answer["evaluations"] if each["scored"]]
    kept = scored[-ask.limits.evaluations :]
    names = {each["name"] for each in kept}
    # The pages offer what is listed, so only what is here is.
    listed = [each for each in answer["evaluations"] if each["name"] in names or not each["scored"]]
    ask.put("evaluations", {}, answer | {"evaluations": listed, "repeats": [ask.run]})
    metrics = [each["name"] for each in answer["metrics"]]
    pages = {each["name"]: _ask_scores(ask, each["name"], metrics) for each in kept}
    if kept:
        chosen = _ask_listed(ask, kept, metrics, pages)
        _ask_contrast(ask, kept, metrics)
        few = f"Of {kept[-1].get('samples', 0):,} samples, all have their scores and {len(pages[kept[-1]['name']]):,} a page."
        ask.say(f"{few} Captured tensors of up to {SMALL_ELEMENTS:,} elements are here, of {chosen:,} of the worst larger ones too.")
        ask.say(f"Captured tensors of more than {MOST_ELEMENTS:,} elements are left out.")
    if len(kept) < len(scored):
        ask.say(f"Of {len(scored):,} evaluations, the last {len(kept):,}.")


def _ask_scores(ask: Questions, evaluation: str, metrics: list[str]) -> dict[str, None]:
    """Ask for scores, lists and pictures; return the samples that the lists name."""
    named: dict[str, None] = {}
    group = f"scores {evaluation}"
    ask("score-ids", {"evaluation": evaluation}, group=group)
    map_of = ask("embedding", {"evaluation": evaluation}, group=group) or {"choices": []}
    for of in map_of["choices"]:
        ask("embedding", {"evaluation": evaluation, "of": of}, group=group)
    for metric in metrics:
        words = {"evaluation": evaluation, "metric": metric}
        ask("scores", words, group=group)
        ask("score-figure", words, group=group)
        for where in ("", *_filters(metric)):
            ask("classes", words | {"where": where}, group=group)
            listed = ask("samples", words | {"where": where, "most": _MOST_ROWS}, group=group) or {"rows": []}
            rows = [row["idx"] for row in listed["rows"]]
            named |= dict.fromkeys(rows)
            _ask_pictures(ask, evaluation, rows, group)
            if where:
                ask("score-mask", words | {"where": where}, group=group)
    return named


def _ask_pictures(ask: Questions, evaluation: str, listed: list[str], group: str) -> None:
    """Ask for the thumbnails as the page does: 48 at a time."""
    for first in range(0, len(listed), _PICTURES):
        words = {"evaluation": evaluation, "idx": listed[first : first + _PICTURES]}
        found = ask("thumbnails", words, group=group) or {"overlays": []}
        for overlay in found["overlays"][:_OVERLAYS]:
            ask("thumbnails", words | {"overlay": overlay}, group=group)


def _filters(metric: str) -> tuple[str, ...]:
    """Return the filters that the page has buttons for."""
    return "label != prediction", f"rank({_named(metric)}) <= 20"


def _named(metric: str) -> str:
    """Return a metric as an expression names it, in the words of the page.

    >>> _named("loss"), _named("parts[0]"), _named("my/score")
    ('loss', 'parts[0]', "score('my/score')")
    """
    return metric if re.fullmatch(r"[A-Za-z_]\w*(\[\d+\])?", metric) else f"score('{metric}')"


def _ask_listed(
    ask: Questions, kept: list[dict[str, Any]], metrics: list[str], pages: dict[str, dict[str, None]]
) -> int:
    """Ask for every sample that a list leads to, and for the worst ones with all they hold; return how many these are."""
    last = kept[-1]["name"]
    worst: dict[str, None] = {}
    for metric in metrics:
        rows = (ask.look("samples", {"evaluation": last, "metric": metric, "most": _MOST_ROWS}) or {"rows": []})["rows"]
        worst |= dict.fromkeys(row["idx"] for row in rows[: max(ask.limits.samples // len(metrics), 1)])
    for evaluation, listed in pages.items():
        for idx in worst | listed:
            most = MOST_ELEMENTS if idx in worst else SMALL_ELEMENTS if evaluation == last else 0
            _ask_sample(ask, evaluation, idx, metrics, most)
    return len(worst)


def _ask_sample(ask: Questions, evaluation: str, idx: str, metrics: list[str], most: int) -> None:
    """Ask for the page of a sample, by each metric, and for its tensors of at most so many elements."""
    group = f"sample {evaluation} {idx}"
    answer: dict[str, Any] | None = None
    for metric in ("", *metrics):
        answer = ask("sample", {"evaluation": evaluation, "idx": idx, "metric": metric}, group=group) or answer
    for part, outputs in (("debugger", (answer or {}).get("captured")), ("samples", (answer or {}).get("kept"))):
        for output in outputs or ():
            for path in _tensors(output["node"], most):
                words = {"evaluation": evaluation, "idx": idx, "part": part, "debugger": output["name"], "path": path}
                ask("tensor", words, group=group)


def _tensors(node: dict[str, Any], most: int) -> Iterator[str]:
    """Yield the paths of the tensors in what was captured that have at most so many elements."""
    if node.get("kind") == "tensor" and math.prod(node["shape"]) <= most:
        yield node["path"]
    for _, item in node.get("items", ()):
        yield from _tensors(item, most)


def _ask_contrast(ask: Questions, kept: list[dict[str, Any]], metrics: list[str]) -> None:
    """Ask what separates failed from good samples in the last evaluation with captures, with its examples."""
    for evaluation in [each["name"] for each in kept if each["captured"]][-1:]:
        for metric in metrics:
            answer = ask("contrast", {"evaluation": evaluation, "metric": metric, "percentile": _PERCENTILE})
            for idx in [each for group in (answer or {"examples": {}})["examples"].values() for each in group]:
                _ask_sample(ask, evaluation, idx, metrics, MOST_ELEMENTS)


# --------------------------------------------------------------------------------


_OF_RUN: Final = "/api/run/{run}"
_MOST_STACKS: Final = 64
OVERVIEW_LAYERS: Final[dict[str, str | int]] = {"pattern": "*:gradient", "layers": 1, "rows": 60}
_NARROWED: Final = ("steps", "evaluations")  # a copy lists only those that it holds


def ask_all(asker: Asker, run: str, shelf: Shelf) -> None:
    """Ask what the pages ask about a run, and file the answers."""
    ask = Questions(asker, run, shelf)
    ask.say("A copy shows no more than this; what was written to the run later is not in it.")
    overview = ask("", {}) or {}
    for path, of_run in questions_without_parameters(asker.routes):
        if path not in _NARROWED:
            ask(path, {}, of_run=of_run)
    ask("rows", {"run": run}, of_run=False)
    _ask_profile(ask)
    _ask_ranks(ask)
    ask("story", {"quick": 1})
    ask("heat", OVERVIEW_LAYERS)
    ask_layers(ask, overview)
    ask_samples(ask)


def questions_without_parameters(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, bool]]:
    """Yield the paths that can be asked as they are, and whether each is about a run; figures are asked by name."""
    from sonde.views.web.figures_api import FIGURES
    from sonde.views.web.live_api import STREAM

    for path in (str(getattr(route, "path", "")) for route in routes):
        rest = path.removeprefix(_OF_RUN).strip("/") if path.startswith(_OF_RUN) else None
        if rest == "figure/{name}":
            yield from ((f"figure/{name}", True) for name in FIGURES)
        elif rest is not None and "{" not in rest and rest != STREAM:
            yield rest, True
        elif rest is None and path.startswith("/api/"):
            yield path.removeprefix("/api/"), False


def _ask_ranks(ask: Questions) -> None:
    answer = ask("ranks", {}) or {"ranks": [], "sites": [], "shown": []}
    for what in answer["shown"] if answer["ranks"] else ():
        ask("figure/ranks", {"what": what})
    for site in answer["sites"][: ask.limits.sites]:
        ask("figure/rank-spread", {"site": site}, group="ranks")
    for row in [each for each in answer["ranks"] if each["stacks"]][:_MOST_STACKS]:
        ask(f"rank/{row['rank']}", {}, group="ranks")


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
        """Note in the copy what it leaves out."""
        self.shelf.done.left_out.append(line)

    def _whole(self, path: str) -> str:
        return f"run/{self.run}{'/' + path if path else ''}"
