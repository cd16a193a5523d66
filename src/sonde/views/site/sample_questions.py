"""What the pages about samples ask: the scores of all, and a few samples with their captures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sonde.views.site.questions import Questions

MOST_ELEMENTS: Final = 1 << 20
_MOST_ROWS: Final = 200  # as many as the page lists
_PERCENTILE: Final = 10  # where its slider stands at first


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
    for evaluation in kept:
        _ask_scores(ask, evaluation["name"], metrics)
    if kept:
        chosen = _ask_worst(ask, kept, metrics)
        _ask_contrast(ask, kept, metrics, chosen)
        ask.say(f"Captured tensors of more than {MOST_ELEMENTS:,} elements are left out.")
        every = kept[-1].get("samples", 0)
        if every > len(chosen):
            ask.say(f"Of {every:,} samples, all have their scores and {len(chosen):,} of the worst their captures.")
    if len(kept) < len(scored):
        ask.say(f"Of {len(scored):,} evaluations, the last {len(kept):,}.")


def _ask_scores(ask: Questions, evaluation: str, metrics: list[str]) -> None:
    group = f"scores {evaluation}"
    ask("score-ids", {"evaluation": evaluation}, group=group)
    for metric in metrics:
        words = {"evaluation": evaluation, "metric": metric}
        ask("scores", words, group=group)
        ask("score-figure", words, group=group)
        for where in ("", *_filters(metric)):
            ask("samples", words | {"where": where, "most": _MOST_ROWS}, group=group)
            if where:
                ask("score-mask", words | {"where": where}, group=group)


def _filters(metric: str) -> tuple[str, ...]:
    """Return the filters that the page has buttons for."""
    return "label != prediction", f"rank({_named(metric)}) <= 20"


def _named(metric: str) -> str:
    """Return a metric as an expression names it, in the words of the page.

    >>> _named("loss"), _named("parts[0]"), _named("my/score")
    ('loss', 'parts[0]', "score('my/score')")
    """
    return metric if re.fullmatch(r"[A-Za-z_]\w*(\[\d+\])?", metric) else f"score('{metric}')"


def _ask_worst(ask: Questions, kept: list[dict[str, Any]], metrics: list[str]) -> dict[str, None]:
    """Ask for the worst samples by each metric, in all evaluations; return their ids."""
    last = kept[-1]["name"]
    chosen: dict[str, None] = {}
    for metric in metrics:
        words = {"evaluation": last, "metric": metric, "most": _MOST_ROWS}
        rows = (ask.look("samples", words) or {"rows": []})["rows"]
        chosen |= dict.fromkeys(row["idx"] for row in rows[: max(ask.limits.samples // len(metrics), 1)])
    for idx in chosen:
        for evaluation in kept:
            _ask_sample(ask, evaluation["name"], idx, ["", *metrics])
        for metric in metrics:  # as the filtered list of the last evaluation leads to it
            for where in _filters(metric):
                words = {"evaluation": last, "idx": idx, "metric": metric, "where": where}
                ask("sample", words, group=f"sample {last} {idx}")
    return chosen


def _ask_sample(ask: Questions, evaluation: str, idx: str, metrics: list[str]) -> None:
    group = f"sample {evaluation} {idx}"
    answer: dict[str, Any] | None = None
    for metric in metrics:
        answer = ask("sample", {"evaluation": evaluation, "idx": idx, "metric": metric}, group=group) or answer
    for part, outputs in (("debugger", (answer or {}).get("captured")), ("samples", (answer or {}).get("kept"))):
        for output in outputs or ():
            for path in _tensors(output["node"]):
                words = {"evaluation": evaluation, "idx": idx, "part": part, "debugger": output["name"], "path": path}
                ask("tensor", words, group=group)


def _tensors(node: dict[str, Any]) -> Iterator[str]:
    """Yield the paths of the tensors in what was captured; of large ones the page asks a plane at a time."""
    if node.get("kind") == "tensor" and math.prod(node["shape"]) <= MOST_ELEMENTS:
        yield node["path"]
    for _, item in node.get("items", ()):
        yield from _tensors(item)


def _ask_contrast(ask: Questions, kept: list[dict[str, Any]], metrics: list[str], chosen: dict[str, None]) -> None:
    """Ask what separates failed from good samples in the last evaluation with captures, with its examples."""
    for evaluation in [each["name"] for each in kept if each["captured"]][-1:]:
        for metric in metrics:
            words = {"evaluation": evaluation, "metric": metric, "percentile": _PERCENTILE}
            answer = ask("contrast", words)
            for idx in [each for group in (answer or {"examples": {}})["examples"].values() for each in group]:
                _ask_sample(ask, evaluation, idx, ["", *metrics])
                chosen[idx] = None
