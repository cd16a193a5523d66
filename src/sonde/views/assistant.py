"""Runs for coding assistants: a read-only server of the Model Context Protocol, through its official Python SDK.

The server answers questions about the runs below one folder, and reads nothing outside it: a run is looked up by its
name among those that were found, and no name is ever turned into a path (see `views.web.library`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from starlette.requests import Request

from sonde.analysis import describe, ending_of, find_loss, keys_of, thin, usual_stat
from sonde.analysis.samples import pick
from sonde.analysis.scores import find_evaluations
from sonde.analysis.source_lines import locate
from sonde.core import files
from sonde.diagnosis.rules import RULES
from sonde.diagnosis.second_opinion import WHOLE, diagnose, findings_of
from sonde.errors import OptionError, RunError, RunNotFound, SelectionError, SondeError
from sonde.records import Finding, words_of
from sonde.store import Run
from sonde.version import VERSION
from sonde.views.document import evidence_line, ranked
from sonde.views.report import ending_words, render_report
from sonde.views.web import compare_api
from sonde.views.web.answers import Query
from sonde.views.web.library import Library, Listed, OpenRun, is_inside
from sonde.views.web.sample_api import SampleApi
from sonde.views.web.sample_store import SampleStore, refuse_links

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer


_INSTRUCTIONS: Final = """Sonde recorded these PyTorch trainings: statistics of every layer at every step, and findings.
Begin with `diagnose`: it names what is wrong with a run, the evidence, the line and a fix. Without a run's name every
tool means the latest run. Then `explain` a finding, look at a `series`, `compare` two runs, find their
`first_divergence`, or look at a `sample`. Nothing can be changed through these tools."""

_MOST_READINGS: Final = 50_000
"""Larger runs are answered with what was found while they were recorded, so that an answer takes less than a second."""
_MOST_POINTS: Final = 500
_MOST_SITES: Final = 40
_RULES: Final = {rule.kind: rule for rule in RULES}


class Assistant:
    """Answers questions about the runs below a folder. Every public method with a docstring is a tool."""

    def __init__(self, root: Path) -> None:
        self.library = Library([root])
        self._samples = SampleStore()

    def list_runs(self, limit: int = 20) -> Any:
        """List the recorded runs, the latest first: name, status, steps, last loss, and the kinds of its findings."""
        listed = self._listed()
        return {"runs": [self._row(each) for each in listed[: max(limit, 1)]], "total": len(listed)}

    def diagnose(self, run: str = "") -> Any:
        """Report what is wrong with a run: each cause with its evidence, line and fix. By default the latest run."""
        return self._diagnose(self._open(run))

    def explain(self, kind: str, run: str = "") -> Any:
        """Explain one finding of a run in full, such as `missing_zero_grad`: evidence, fix, how to refute it."""
        opened = self._open(run)
        found = [each for each in self._findings(opened)[0] if each.kind == kind]
        about = finding_page(kind) if not found or kind in _RULES else None
        return {
            "run": opened.name,
            "finding": found[0].to_json() if found else None,
            "line": locate(opened.run, found[0]) if found else None,
            "found": bool(found),
            "about": about,
        }

    def series(self, site: str = "", stat: str = "", run: str = "", last: int = 0, points: int = 100) -> Any:
        """Return a measured curve: `site` is a key or glob (`loss`, `*.weight:gradient`), `stat` such as norm or mean.

        Without a site, the sites that can be asked for are listed. `last` restricts it to the last steps.
        """
        opened = self._open(run)
        reader = opened.run
        if not site:
            known = [each.key for each in reader.sites if each.same_as is None]
            return {"run": opened.name, "sites": known[:_MOST_POINTS], "total": len(known)}
        found, keys = reader.find(site), keys_of(reader)
        start = int(reader.steps[-last]) if 0 < last < len(reader.steps) else None
        chosen = {each.key: stat or usual_stat(each, keys) for each in found[:_MOST_SITES]}
        shown = [_curve(reader, key, name, start, points) for key, name in chosen.items()]
        return {"run": opened.name, "series": shown, "total": len(found)}

    def compare(self, other: str, run: str = "") -> Any:
        """Compare two runs: settings that differ, their findings, and the layers that differ most at the end."""
        both = [self._open(run), self._open(other)]
        beside = compare_api.compare(both)
        layers = compare_api.compare_layers(both)["rows"][:_MOST_SITES]
        return {"runs": beside["runs"], "settings": beside["settings"]["differing"], "layers": layers}

    def first_divergence(self, other: str, run: str = "") -> Any:
        """Find the first step, and the first tensor in it, at which two runs differ: exactly, and by more than 1%."""
        return compare_api.parting(self._open(run), self._open(other))

    def sample(self, idx: str = "", expression: str = "", run: str = "", evaluation: str = "") -> Any:
        """Show one sample by `idx` (scores, label, captures), or the samples that match `expression`: `loss > 0.5`."""
        opened = self._open(run)
        if not idx and not expression:
            raise OptionError("Name a sample by idx, or give an expression such as 'rank(loss) <= 10'.")
        if idx:
            return self._sample(opened, idx, evaluation)
        if len(self._samples.evaluations(opened)) < len(find_evaluations(opened.run.path)):
            raise RunNotFound(f"The samples of {opened.name} are not shown: a link in them leads out of the folder.")
        found = pick(opened.run.path, expression, evaluation=evaluation)
        return {"run": opened.name, "count": len(found), "samples": found[:_MOST_SITES]}

    # ------------------------------------------------------------------ pages

    def page_of_run(self, run: str) -> str:
        """Return the report of a run in Markdown; `run` is the id that `list_runs` returns."""
        return render_report(self._open(run).run, "md")

    # ------------------------------------------------------------------

    def _open(self, name: str) -> OpenRun:
        """Open a run by its name or id; the latest by default."""
        listed = self._listed()
        named = [each for each in listed if name in (each.name, each.id) or (not name and each.summary.problem is None)]
        if not named and not name:
            raise RunNotFound(f"There is no run below {self.library.roots[0]} yet.")
        if not named:
            names = ", ".join(each.name for each in listed[:_MOST_SITES])
            raise RunNotFound(f"There is no run {name!r:.120} here. There are: {names or 'none'}.")
        refuse_links(named[0].summary.path, self.library.roots[0])
        return self.library.open(named[0].id)

    def _listed(self) -> list[Listed]:
        """Return the runs below the folder; those that a link puts there are not."""
        root = self.library.roots[0]
        return [each for each in self.library.list() if is_inside(each.summary.path, root)]

    def _row(self, listed: Listed) -> dict[str, Any]:
        summary = listed.summary
        row = {"run": listed.name, "id": listed.id, "status": summary.status, "steps": summary.steps}
        if summary.problem:
            return row | {"problem": summary.problem}
        try:
            kinds = [finding.kind for finding in ranked(self._open(listed.id).run.findings)]
        except RunError as error:
            return row | {"problem": str(error)}
        return row | {"last_loss": summary.last_loss, "created": summary.created, "findings": kinds}

    def _findings(self, opened: OpenRun) -> tuple[list[Finding], str]:
        """Return what is wrong, and how that is known."""
        run = opened.run
        if len(run.sites) * min(len(run.steps), WHOLE) > _MOST_READINGS:
            return findings_of(run), "as found while the run was recorded; `sonde diagnose` judges its files anew"
        return list(opened.keep("diagnosis", lambda: diagnose(run)).findings), "judged from the files of the run"

    def _diagnose(self, opened: OpenRun) -> dict[str, Any]:
        run = opened.run
        found, basis = self._findings(opened)
        ending, loss = ending_of(run), find_loss(run.sites)
        curve = None if loss is None else run.series(loss, "value")
        return {
            "run": opened.name,
            "status": opened.status,
            "steps": int((run.steps > 0).sum()),
            "ending": None if ending is None else ending_words(ending),
            "loss": None if curve is None or not len(curve.steps) else describe(curve.steps, curve.values),
            "findings": [_described(run, finding) for finding in found],
            "basis": basis,
            "problems": run.problems[:10],
        }

    def _sample(self, opened: OpenRun, idx: str, evaluation: str) -> Any:
        asked = urlencode({"idx": idx, "evaluation": evaluation}).encode()
        request = Request({"type": "http", "query_string": asked, "path_params": {}, "headers": []})
        body = SampleApi(self._samples).sample(opened, Query(request)).body
        return files.loads(bytes(body), "the sample")


def _described(run: Run, finding: Finding) -> dict[str, Any]:
    """Return a finding as an assistant needs it: cause, evidence, fix, and where to look."""
    line = locate(run, finding)
    return {
        "kind": finding.kind,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "cause": finding.cause,
        "evidence": [evidence_line(e.name, e.value, e.relation, e.threshold) for e in finding.evidence],
        "experiment": finding.experiment,
        "fix": finding.fix,
        "refute": finding.refute,
        "where": list(finding.sites),
        "line": None if line is None else {"file": line.file, "line": line.line, "text": line.text},
        "since_step": finding.step,
        "explains": list(finding.explains),
    }


def _curve(run: Run, key: str, stat: str, start: int | None, points: int) -> dict[str, Any]:
    series = run.series(key, stat, start=start)
    steps, values = thin(series.steps, series.values, min(max(points, 2), _MOST_POINTS))
    trend = describe(series.steps, series.values) if len(series.steps) else None
    return {"site": key, "stat": stat, "steps": steps, "values": values, "trend": trend}


def finding_page(kind: str) -> str:
    """Return what Sonde knows about a kind of finding, in Markdown.

    Raises:
        SelectionError: There is no such kind.

    """
    rule = _RULES.get(kind)
    if rule is None:
        raise SelectionError(f"There is no rule for {kind!r:.80}. The page sonde://findings lists all kinds.")
    parts = {
        "Fix": _without_fields(rule.fix),
        "To prove it wrong": _without_fields(rule.refute),
        "Rests on": "an exact relation" if rule.exact else "statistics of the run",
        "Needs": ", ".join(f"`{need}`" for need in rule.needs),
        "Explains": ", ".join(f"`{other}`" for other in sorted(rule.explains)),
    }
    lines = "".join(f"\n**{title}:** {text}\n" for title, text in parts.items() if text)
    return f"# {words_of(kind)} (`{kind}`)\n\n{rule.summary}\n{lines}"


def _without_fields(text: str) -> str:
    """Return the text of a rule with the names of what a finding fills in as words.

    >>> _without_fields("Remove {the_softmax} from the model.")
    'Remove the softmax from the model.'
    """
    return re.sub(r"\{(\w+)[^}]*\}", lambda name: name[1].replace("_", " "), text)


def index_page() -> str:
    """Return all kinds of findings with a sentence each, in Markdown."""
    return "# Findings\n\n" + "".join(f"- `{rule.kind}`: {rule.summary}\n" for rule in RULES)


# --------------------------------------------------------------------------------
# The server of the protocol.

_TOOLS: Final = ("list_runs", "diagnose", "explain", "series", "compare", "first_divergence", "sample")


def make_server(root: Path) -> MCPServer[Any]:
    """Return a server of the runs below a folder."""
    from mcp.server.mcpserver import MCPServer
    from mcp_types import ToolAnnotations

    assistant = Assistant(root)
    server: MCPServer[Any] = MCPServer("sonde", instructions=_INSTRUCTIONS, version=VERSION, log_level="WARNING")
    read_only = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
    for name in _TOOLS:
        method = getattr(assistant, name)
        server.add_tool(
            _answer(method),
            name=name,
            description=inspect.getdoc(method),
            annotations=read_only,
            structured_output=False,
        )
    pages: dict[str, tuple[str, str, Callable[..., str]]] = {
        "sonde://findings": ("findings", "All kinds of findings.", index_page),
        "sonde://findings/{kind}": ("finding", "What a kind of finding means, and how to fix it.", finding_page),
        "sonde://runs/{run}": ("run", "The report of a run, by its id.", assistant.page_of_run),
    }
    for uri, (name, about, make) in pages.items():
        server.resource(uri, name=name, description=about, mime_type="text/markdown")(_page(make))
    return server


def _page(make: Callable[..., str]) -> Callable[..., str]:
    """Return a page that, where there is none, names what is wrong."""
    from mcp.server.mcpserver.exceptions import ResourceNotFoundError

    @wraps(make)
    def page(*args: Any, **given: Any) -> str:
        try:
            return make(*args, **given)
        except SondeError as error:
            raise ResourceNotFoundError(str(error)) from None

    return page


def _answer(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tool that answers with strict JSON, and with one sentence where something is wrong."""
    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(method)
    def answer(**given: Any) -> str:
        try:
            return files.text(method(**given), indent=1)
        except SondeError as error:
            raise ToolError(str(error)) from None

    # The SDK reads the annotations of the function itself; here they are names.
    answer.__signature__ = inspect.signature(method, eval_str=True).replace(return_annotation=str)  # type: ignore[attr-defined]
    return answer
