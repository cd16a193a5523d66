"""Draw the tree of modules, each as large as its parameters, coloured by a statistic or by findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from sonde.analysis.unusual import layer_of, model_entries
from sonde.errors import OptionError
from sonde.records import SEVERITIES, Finding, RunHeader
from sonde.store import Run
from sonde.views.figures.curves import read_lines, refuse_names, span_of_readings
from sonde.views.figures.heatmaps import log_ticks
from sonde.views.figures.theme import (
    BAD,
    GREY,
    SEQUENTIAL,
    SEVERITY_COLOURS,
    Figure,
    Theme,
    empty,
    finish,
    graph_objects,
    safe,
    stat_title,
)

_ROOT: Final = "(model)"
_RECENT: Final = 20
_MOST_MODULES: Final = 500  # a browser takes a second for each thousand, and slivers cannot be distinguished


@dataclass(slots=True)
class _Node:
    """A module: its own parameters, and what it is coloured by."""

    name: str
    kind: str = ""
    own: int = 0
    total: int = 0
    children: list[str] = field(default_factory=list)


def model_tree(
    source: Run | Mapping[str, float],
    *,
    colour: Literal["statistic", "findings"] | Mapping[str, float] = "statistic",
    quantity: str = "gradient",
    stat: str = "rms",
    step: int | None = None,
    kind: Literal["icicle", "treemap"] = "icicle",
    theme: Theme = "light",
) -> Figure:
    """Draw the modules of a run's model, each as wide as its parameters are many.

    Args:
        source: A run, or how large each module is, by its name: `{"encoder.0": 512}`.
        colour: Colour by a statistic, by the worst finding that names the module, or by numbers by module name.
        quantity: The quantity whose statistic colours: `gradient`, `parameter`, `update`, `output`.
        stat: Which statistic.
        step: At which step; by default the median of the last steps.
        kind: `icicle` or `treemap`.
        theme: `light` or `dark`.

    """
    refuse_names(source, "a run, or the sizes of modules")
    if kind not in ("icicle", "treemap"):
        raise OptionError(f"kind={kind!r} is not known; use 'icicle' or 'treemap'.")
    nodes, title = (
        (_nodes_of_sizes(source), "Model tree")
        if isinstance(source, Mapping)
        else (_nodes(source.header), _title(source))
    )
    if len(nodes) < 2:
        return empty(title, "The modules of the model are not known.", theme=theme)
    whole, nodes = nodes, _largest(nodes)
    if isinstance(colour, Mapping):
        marker, words, note = _by_values(nodes, whole, colour, "value")
    elif isinstance(source, Mapping):
        marker, words, note = {"colors": [GREY] * len(nodes)}, [""] * len(nodes), "width: size"
    elif colour == "findings":
        marker, words, note = _by_findings(nodes, source.findings)
    else:
        values = _statistic(source, quantity, stat, step)
        marker, words, note = _by_values(nodes, whole, values, stat_title(stat, quantity))
    note += f"; the {len(nodes):,} largest of {len(whole):,} modules" if len(nodes) < len(whole) else ""
    go = graph_objects()
    names = list(nodes)
    trace = (go.Icicle if kind == "icicle" else go.Treemap)(
        ids=[safe(name) for name in names],
        labels=[safe(name.rpartition(".")[2]) for name in names],
        parents=[safe(_parent(name, nodes)) for name in names],
        values=[nodes[name].total for name in names],
        branchvalues="total",
        sort=False,  # the model's own order says more than sizes, which are seen anyway
        marker=marker,
        leaf={"opacity": 1},  # colours mean something, in a leaf as well
        text=[safe(nodes[name].kind) for name in names],
        customdata=_hover_rows(nodes, words),
        hovertemplate="%{customdata[0]}<br>%{customdata[1]} parameters<br>%{customdata[2]}<extra></extra>",
        textinfo="label+text",
        **({"tiling": {"orientation": "v"}} if kind == "icicle" else {}),
    )
    return finish(go.Figure(trace), title, note, theme=theme, height=460, margin={"l": 8, "r": 8, "t": 72, "b": 8})


def _largest(nodes: dict[str, _Node]) -> dict[str, _Node]:
    """Return the modules with the most parameters, in their order. None is kept without those around it."""
    if len(nodes) <= _MOST_MODULES:
        return nodes
    order = sorted(nodes, key=lambda name: (-nodes[name].total, name.count(".") + (name != _ROOT)))
    kept = set(order[:_MOST_MODULES])
    return {name: node for name, node in nodes.items() if name in kept}


def _title(run: Run) -> str:
    return f"Model tree of {run.header.model.get('name', 'the model')}"


def _hover_rows(nodes: Mapping[str, _Node], words: Iterable[str]) -> list[list[str]]:
    pairs = zip(nodes.values(), words, strict=True)
    return [[f"{safe(node.name)} {safe(node.kind)}", f"{node.total:,}", word] for node, word in pairs]


def _nodes(header: RunHeader) -> dict[str, _Node]:
    nodes = {_ROOT: _Node(_ROOT, str(header.model.get("name", "")))}
    for entry in model_entries(header, "modules"):
        name = str(entry.get("name", "")) or _ROOT
        _grow(nodes, name).kind = str(entry.get("kind", ""))
    for entry in model_entries(header, "parameters"):
        shape = entry.get("shape")
        sizes = shape if isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) else [0]
        _grow(nodes, str(entry.get("name", "")).rpartition(".")[0] or _ROOT).own += int(
            np.prod(sizes, dtype=np.float64)
        )
    return _joined(nodes)


def _nodes_of_sizes(sizes: Mapping[str, float]) -> dict[str, _Node]:
    nodes = {_ROOT: _Node(_ROOT)}
    for name, size in sizes.items():
        if not 0 <= size < np.inf:
            raise OptionError(f"The size of {name!r} must be a number of at least 0; got {size!r}.")
        _grow(nodes, name or _ROOT).own += int(size)
    return _joined(nodes)


def _joined(nodes: dict[str, _Node]) -> dict[str, _Node]:
    for name in list(nodes):
        if name != _ROOT:
            nodes[_parent(name, nodes)].children.append(name)
    _add_up(nodes)
    return nodes


def _grow(nodes: dict[str, _Node], name: str) -> _Node:
    parts = [] if name == _ROOT else name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        nodes.setdefault(path, _Node(path))
    return nodes[name]


def _parent(name: str, nodes: Mapping[str, _Node]) -> str:
    if name == _ROOT:
        return ""
    above = name.rpartition(".")[0]
    return above if above in nodes else _ROOT


def _add_up(nodes: dict[str, _Node]) -> None:
    # Children come after their parents, so going backwards each sum is complete when it is used.
    least = max(1, sum(node.own for node in nodes.values()) // 200)
    for name in sorted(nodes, key=lambda each: each.count(".") + (each != _ROOT), reverse=True):
        node = nodes[name]
        # A module without parameters (an activation) is still a module, and gets a sliver to be seen.
        node.total = node.own + sum(nodes[child].total for child in node.children) or least


def _statistic(run: Run, quantity: str, stat: str, step: int | None) -> dict[str, float]:
    sites = [site for site in run.sites if site.quantity == quantity and site.phase == "train" and site.same_as is None]
    name = "ratio" if quantity == "update" and stat == "rms" else stat
    start, stop = span_of_readings(run, sites, step, _RECENT)
    lines = read_lines(run, sites, name, start=start, stop=stop)
    by_key = {site.key: site for site in sites}
    values: dict[str, float] = {}
    biggest: dict[str, int] = {}
    for line in lines:
        site, known = by_key[line.name], line.values[np.isfinite(line.values)]
        layer, size = layer_of(site) or _ROOT, int(np.prod(site.shape)) if site.shape else 0
        if line.bad[-1:].any():
            values[layer], biggest[layer] = float("inf"), size  # drawn as what it is, and never by a finite neighbour
        elif len(known) and size >= biggest.get(layer, -1):  # the largest tensor represents the layer
            values[layer], biggest[layer] = float(np.median(known)), size
    return values


def _by_values(
    nodes: Mapping[str, _Node], whole: Mapping[str, _Node], values: Mapping[str, float], what: str
) -> tuple[dict[str, Any], list[str], str]:
    # Over the whole model: what is inside a container counts although it may be too small to be drawn.
    given = np.array([_value(name, whole, values) for name in nodes])
    broken = np.isinf(given)
    given = np.where(broken, np.nan, given)
    known = given[np.isfinite(given)]
    log = bool(len(known) and (known > 0).all() and float(known.max()) / float(known.min()) > 10)
    shown = np.log10(given) if log else given
    words = [
        "NaN or infinite" if bad else f"{safe(what)}: {value:.3g}" if np.isfinite(value) else "not measured here"
        for value, bad in zip(given, broken, strict=True)
    ]
    bar: dict[str, Any] = {"title": {"text": safe(what), "side": "right"}, "thickness": 12, "outlinewidth": 0}
    # Of a single value there is no scale to show.
    low, high = (float(np.nanmin(shown)), float(np.nanmax(shown))) if len(known) else (0.0, 0.0)
    if log:
        bar |= log_ticks(low, high)
    colours = _painted(shown) if len(known) else [GREY] * len(given)
    marker: dict[str, Any] = {
        "colors": [BAD if bad else colour for colour, bad in zip(colours, broken, strict=True)],
    }
    if high > low:
        marker |= {"colorscale": SEQUENTIAL, "showscale": True, "colorbar": bar, "cmin": low, "cmax": high}
    note = f"width: parameters; colour: {what}{' (logarithmic)' if log else ''}"
    note += "; containers: over what is inside; grey: not measured"
    return marker, words, note


def _value(name: str, nodes: Mapping[str, _Node], values: Mapping[str, float]) -> float:
    """Return the value of a module: its own, or the root of the mean square over what is inside it, by size."""
    if name in values:
        return values[name]
    inside = [(_value(child, nodes, values), nodes[child].total) for child in nodes[name].children]
    known = [(value, size) for value, size in inside if not np.isnan(value)]
    if not known or any(np.isinf(value) for value, _ in known):
        return float("inf") if known else float("nan")
    sizes = np.array([max(size, 1) for _, size in known], dtype=np.float64)
    return float(np.sqrt(np.average(np.square([value for value, _ in known]), weights=sizes)))


def _painted(values: Any) -> list[str]:
    """Return colours by hand: Plotly would mix those of children into parents that were not measured."""
    from sonde.views.terminal.style import ramp

    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    shares = (values - low) / (high - low) if high > low else np.where(np.isfinite(values), 0.5, np.nan)
    return [ramp(float(share)).get_truecolor().hex if np.isfinite(share) else "#9aa0a6" for share in shares]


def _by_findings(nodes: Mapping[str, _Node], findings: Iterable[Finding]) -> tuple[dict[str, Any], list[str], str]:
    worst: dict[str, Finding] = {}
    for finding in findings:
        for site in finding.sites:
            path = site.partition(":")[0]
            name = path if path in nodes else path.rpartition(".")[0]
            held = worst.get(name)
            if name in nodes and (held is None or SEVERITIES.index(finding.severity) > SEVERITIES.index(held.severity)):
                worst[name] = finding
    colours = [SEVERITY_COLOURS[worst[name].severity] if name in worst else GREY for name in nodes]
    words = [safe(worst[name].kind.replace("_", " ")) if name in worst else "no finding names it" for name in nodes]
    return {"colors": colours}, words, f"{len(worst)} of {len(nodes)} modules are named by findings"
