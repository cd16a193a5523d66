"""Scores of all samples: score maps as raw bytes, filtered lists, failures common to runs, scores over epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response
from starlette.routing import Route

from sonde.analysis.contrast import contrast
from sonde.analysis.query import FUNCTIONS, parse
from sonde.analysis.samples import (
    EXTRA,
    average,
    columns_of,
    common_failures,
    describe_rows,
    failed_mask,
    name_of,
    repeats_of,
    worst_rows,
)
from sonde.analysis.scores import Evaluation, ScoreTable
from sonde.errors import OptionError, RunError
from sonde.store.layout import CAPTURES, KEPT
from sonde.store.pages import Datapoint
from sonde.views.web.answers import Query, as_bytes, as_json, raw_route
from sonde.views.web.compare_api import describe_contrast, draw_scores
from sonde.views.web.figures_api import pack
from sonde.views.web.library import Library, OpenRun
from sonde.views.web.sample_api import sample_routes
from sonde.views.web.sample_pictures import Pictures
from sonde.views.web.sample_store import SampleStore, few_enough, sample_text

_MOST_ROWS: Final = 500
_MOST_RUNS: Final = 40
_MOST_READ: Final = 8  # evaluations whose scores tell metrics and ranges of colours

Answer = Callable[[OpenRun, Query], Response]


def routes(library: Library) -> list[Route]:
    """Return the routes of the pages *Samples*, *Sample* and *Good against failed*."""
    store = SampleStore()
    api = _Api(library, store)
    topics: dict[str, Answer] = {
        "evaluations": api.evaluations,
        "scores": api.scores,
        "score-ids": api.ids,
        "score-mask": api.mask,
        "samples": api.samples,
        "score-figure": api.figure,
        "common-failures": api.common,
        "contrast": api.contrast,
        "thumbnails": api.thumbnails,
        "classes": api.classes,
        "changes": api.changes,
        "embedding": api.embedding,
    }
    own = [raw_route(library, path, answer) for path, answer in topics.items()]
    return own + sample_routes(library, store)


class _Api:
    def __init__(self, library: Library, store: SampleStore) -> None:
        self._library, self._store = library, store
        self._pictures = Pictures(store)

    def evaluations(self, opened: OpenRun, query: Query) -> Response:
        """List the evaluations, the metrics they have, and the runs that can be laid beside."""
        found = self._store.evaluations(opened)
        read = {each.name for each in few_enough(found, _MOST_READ, lambda each: False)}
        rows, tables = [], []
        for each in found:
            row = _about(each)
            if each.name in read:
                try:
                    table = self._store.table(each)
                except RunError as error:
                    row |= {"scored": False, "problem": str(error)}
                else:
                    row["samples"] = len(table.ids)
                    tables.append(table)
            rows.append(row)
        metrics = _metrics(tables)
        return as_json(
            {
                "evaluations": rows,
                "metrics": metrics,
                "columns": [*(each["name"] for each in metrics), *EXTRA],
                "functions": FUNCTIONS,
                "repeats": self._repeats(opened),
            }
        )

    def scores(self, opened: OpenRun, query: Query) -> Response:
        """Send the scores by one metric as float32: one a sample, and with other runs the means, then the spread."""
        tables = self._tables(opened, query)
        metric = self._metric(tables[0], query)
        if len(tables) == 1:
            return as_bytes(_floats(tables[0].column(metric)))
        ids, means, spread = average(tables, metric)
        if ids[: len(tables[0].ids)] != tables[0].ids:
            raise OptionError("The runs do not share their samples.")
        count = len(tables[0].ids)
        return as_bytes(_floats(means[:count]) + _floats(spread[:count]))

    def ids(self, opened: OpenRun, query: Query) -> Response:
        """Name the samples in the order of their scores; null where they are the numbers from 0 on."""
        ids = self._table(opened, query).ids
        plain = ids == list(range(len(ids)))
        return as_json({"count": len(ids), "ids": None if plain else [sample_text(each) for each in ids]})

    def mask(self, opened: OpenRun, query: Query) -> Response:
        """Return a byte for each sample: whether the filters select it."""
        evaluation = self._store.evaluation(opened, query.text("evaluation"))
        return as_bytes(self._picked(evaluation, query).astype(np.uint8).tobytes())

    def samples(self, opened: OpenRun, query: Query) -> Response:
        """List the samples that the filters pick, the worst first."""
        evaluation = self._store.evaluation(opened, query.text("evaluation"))
        table, notes = self._store.table(evaluation), self._store.notes(evaluation)
        if not table.columns:
            return as_json({"total": 0, "of": 0, "rows": [], "metric": None})
        metric = self._metric(table, query)
        rows = worst_rows(table, self._picked(evaluation, query), metric)
        first = query.number("from", 0) or 0
        most = query.number("most", 200, least=1, most=_MOST_ROWS) or 1
        captured = self._store.outputs(evaluation, CAPTURES)
        listed = [
            {
                "idx": sample_text(each.idx),
                "scores": each.scores,
                "label": each.label,
                "prediction": each.prediction,
                "captured": captured is not None and each.idx in captured,
            }
            for each in describe_rows(table, rows[first : first + most], notes)
        ]
        problems = [table.missing_captures] if table.missing_captures else []
        problems += captured.problems[:5] if captured is not None else []
        return as_json(
            {"total": len(rows), "of": len(table.ids), "metric": metric, "rows": listed, "problems": problems}
        )

    def figure(self, opened: OpenRun, query: Query) -> Response:
        """Draw the scores of whole evaluations over epochs."""
        lines = self._lines(opened, query)
        return as_bytes(pack(draw_scores(lines, _grouped(lines), query.text("metric"))), "application/json")

    def _lines(self, opened: OpenRun, query: Query) -> list[dict[str, Any]]:
        lines = []
        for each in self._runs(opened, query):
            points = []
            for found in self._store.evaluations(each):
                value = self._aggregated(found, query.text("metric")) if found.has_scores else None
                if value is not None:
                    points.append({"epoch": found.epoch, "name": found.name, "value": value})
            lines.append({"run": each.id, "name": each.name, "points": points})
        return lines

    def _aggregated(self, evaluation: Evaluation, metric: str) -> float | None:
        try:
            known = self._store.aggregated(evaluation)
        except RunError:
            return None  # the list of evaluations says what is wrong with it
        return known.get(metric or next(iter(known), ""))

    def common(self, opened: OpenRun, query: Query) -> Response:
        """Return in how many runs each sample is among the worst."""
        tables = self._tables(opened, query)
        metric = self._metric(tables[0], query)
        found = common_failures(tables, metric, _percentile(query))
        rows = found.worst_first()
        return as_json(
            {
                "metric": metric,
                "direction": tables[0].directions[metric],
                "threshold": found.threshold,
                "runs": len(tables),
                "ids": [sample_text(each) for each in found.ids],
                "failed": found.failed,
                "scored": found.scored,
                "worst": rows[:_MOST_ROWS],
                "failures": len(rows),
            }
        )

    def thumbnails(self, opened: OpenRun, query: Query) -> Response:
        """Draw some samples small."""
        evaluation = self._store.evaluation(opened, query.text("evaluation"))
        return as_json(
            self._store.answer(
                evaluation, ("thumbnails", query.key), lambda: self._pictures.thumbnails(evaluation, query)
            )
        )

    def classes(self, opened: OpenRun, query: Query) -> Response:
        """Return scores by class and as a histogram, of the samples that the filters select."""
        evaluation = self._store.evaluation(opened, query.text("evaluation"))
        metric = self._metric(self._store.table(evaluation), query)
        return as_json(self._pictures.classes(evaluation, metric, self._picked(evaluation, query)))

    def changes(self, opened: OpenRun, query: Query) -> Response:
        """Return how samples differ between this run and the first beside it."""
        both = self._runs(opened, query)[:2]
        if len(both) < 2:
            raise OptionError("Name another run: with=...")
        name = query.text("evaluation")
        known = {found.name for found in self._store.evaluations(both[1])}
        mine, theirs = (
            self._store.evaluation(opened, name),
            self._store.evaluation(both[1], name if name in known else ""),
        )
        return as_json(self._pictures.changed(mine, theirs, self._metric(self._store.table(mine), query)))

    def embedding(self, opened: OpenRun, query: Query) -> Response:
        """Return a map of the samples in two dimensions."""
        evaluation = self._store.evaluation(opened, query.text("evaluation"))
        return as_json(
            self._store.answer(
                evaluation, ("embedding", query.key), lambda: self._pictures.embedding(evaluation, query)
            )
        )

    def contrast(self, opened: OpenRun, query: Query) -> Response:
        """Return what separates the samples that failed from those that did not."""
        evaluation = self._store.evaluation(opened, query.text("evaluation"))
        return as_json(self._store.answer(evaluation, query.key, lambda: self._contrast(evaluation, query)))

    def _contrast(self, evaluation: Evaluation, query: Query) -> dict[str, Any]:
        table = self._store.table(evaluation)
        metric = self._metric(table, query)
        outputs = self._store.outputs(evaluation, CAPTURES)
        if outputs is None:
            raise OptionError(f"Nothing was captured in {name_of(evaluation)}. Add a debugger to the config.")
        if not outputs and outputs.problems:
            raise OptionError(outputs.problems[0])
        if query.texts("where"):
            failed = self._picked(evaluation, query)
        else:
            failed = failed_mask(table, metric, _percentile(query))
        order = table.worst_first(metric)
        found = contrast(outputs, _named(table, order[failed[order]]), _named(table, order[~failed[order]]))
        return {"metric": metric, "all_failed": int(failed.sum()), **describe_contrast(found)}

    def _picked(self, evaluation: Evaluation, query: Query) -> NDArray[np.bool_]:
        """Return which samples all filters pick."""
        table = self._store.table(evaluation)
        mask = np.ones(len(table.ids), bool)
        filters = query.texts("where")
        if not filters:
            return mask
        columns = columns_of(table, self._store.notes(evaluation))
        for each in filters:
            mask &= parse(each).select(columns)
        return mask

    def _table(self, opened: OpenRun, query: Query) -> ScoreTable:
        return self._store.table(self._store.evaluation(opened, query.text("evaluation")))

    def _tables(self, opened: OpenRun, query: Query) -> list[ScoreTable]:
        """Return the tables of this run and of those beside it; those that lack this evaluation use their last."""
        name = query.text("evaluation")
        tables = []
        for each in self._runs(opened, query):
            known = {found.name for found in self._store.evaluations(each)}
            tables.append(self._store.table(self._store.evaluation(each, name if name in known else "")))
        return tables

    def _runs(self, opened: OpenRun, query: Query) -> list[OpenRun]:
        others = [each for each in query.texts("with") if each != opened.id][: _MOST_RUNS - 1]
        return [opened, *(self._library.open(each) for each in others)]

    def _metric(self, table: ScoreTable, query: Query) -> str:
        metric = query.text("metric") or next(iter(table.columns), "")
        table.column(metric)
        return metric

    def _repeats(self, opened: OpenRun) -> list[str]:
        """Return the ids of the runs that repeat this one, itself included."""
        listed = {each.name: each.id for each in self._library.list()}
        for names in repeats_of(listed).values():
            if opened.name in names:
                return [listed[name] for name in names]
        return [opened.id]


def _about(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "name": evaluation.name,
        "words": name_of(evaluation),
        "epoch": evaluation.epoch,
        "scored": evaluation.has_scores,
        "captured": evaluation.has(CAPTURES),
        "kept": evaluation.has(KEPT),
    }


def _metrics(tables: list[ScoreTable]) -> list[dict[str, Any]]:
    """Return every metric of these tables, which way it is better, and between which values its scores lie."""
    directions = {name: way for table in tables for name, way in table.directions.items()}
    guessed = {name for table in tables for name in table.guessed}
    ranges: dict[str, list[float]] = {}
    for table in tables:
        for name, column in table.columns.items():
            ranges.setdefault(name, []).extend(_range(column))
    return [
        {
            "name": name,
            "direction": way,
            "guessed": name in guessed,
            "low": min(ranges[name], default=None),
            "high": max(ranges[name], default=None),
        }
        for name, way in directions.items()
    ]


def _percentile(query: Query) -> float:
    return float(query.number("percentile", 10, least=1, most=99) or 10)


def _range(column: NDArray[np.float64]) -> list[float]:
    """Return between which values nearly all scores lie: a few extreme ones must not take all the colours."""
    finite = column[np.isfinite(column)]
    return [float(each) for each in np.quantile(finite, (0.01, 0.99))] if finite.size else []


def _floats(values: NDArray[np.float64]) -> bytes:
    with np.errstate(over="ignore"):
        return values.astype("<f4").tobytes()


def _named(table: ScoreTable, rows: NDArray[np.int64]) -> list[Datapoint]:
    return [table.ids[row] for row in rows]


def _grouped(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Average the lines of repeats, point by point."""
    by_name = {line["name"]: line for line in lines}
    groups = []
    for name, members in repeats_of(by_name).items():
        if len(members) < 2:
            continue
        values: dict[str, list[float]] = {}
        epochs: dict[str, int | None] = {}
        for member in members:
            for point in by_name[member]["points"]:
                values.setdefault(point["name"], []).append(point["value"])
                epochs[point["name"]] = point["epoch"]
        points = [
            {
                "name": at,
                "epoch": epochs[at],
                "value": float(np.mean(each)),
                "spread": float(np.std(each, ddof=1)) if len(each) > 1 else None,
                "count": len(each),
            }
            for at, each in values.items()
        ]
        groups.append({"name": name, "runs": members, "points": points})
    return groups
