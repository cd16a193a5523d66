"""What a taped step shows of graphs: which edges messages are passed along, and which graph each node belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.core.tape import Op, references
from sonde.diagnosis.rule import Found, Threshold, above, fact, on_tape
from sonde.diagnosis.tape.reading import TapeReading

_Ids = NDArray[np.int64]
_SCATTERS: Final = ("index_add", "scatter_add", "scatter_reduce", "index_reduce", "index_put")
_GATHERS: Final = ("index", "index_select", "gather")
MIN_GRAPHS: Final = 3
MIN_EDGES: Final = 8
CROSSING = Threshold(0.2, "share of edges between two graphs of a batch, in every list of edges; 0 in a sound batch")


@dataclass(frozen=True)
class _Sent:
    """Rows of one table that are added up in rows of another one."""

    op: Op
    rows: int
    """How many rows the result has."""
    to: _Ids
    source: _Ids | None
    """Which rows were taken before, of as many as the result has; None if all were taken as they are."""


@on_tape
def graphs_that_overlap(reading: TapeReading) -> Found | None:
    """Find a batch of graphs whose edges lead from one graph into another, or all lie in the first one.

    The graphs are known by how nodes are added up, to one row for each target.
    """
    sent = [each for op in reading.forward_ops if (each := _sent(reading, op)) is not None]
    targets = {reading.tape.values[target].shape[:1] for _, target, _ in reading.compared()}
    pools = [each for each in sent if each.source is None and (each.rows,) in targets and _numbers_graphs(each)]
    for pool in pools:
        edges = [each for each in sent if each.source is not None and each.rows == len(pool.to)]
        pairs = [(each.source, each.to) for each in edges if each.source is not None and len(each.to) >= MIN_EDGES]
        if not pairs or any(max(one.max(), two.max()) >= len(pool.to) for one, two in pairs):
            continue
        crossing = [float((pool.to[one] != pool.to[two]).mean()) for one, two in pairs]
        largest = int(np.bincount(pool.to).max())
        within_first = all(max(one.max(), two.max()) < largest for one, two in pairs)
        if min(crossing) >= CROSSING or within_first:
            return _overlap(reading, edges[0].op, pool, min(crossing), within_first=within_first)
    return None


@on_tape
def edges_in_one_direction(reading: TapeReading) -> Found | None:
    """Find a graph all of whose edges lead from a lower number to a higher one, or all the other way.

    Where ends are spread as those of pairs of any two nodes that were put in order, the order says nothing: each pair
    of neighbours was listed once. A tree, a chain or a history has ends that lie elsewhere.
    """
    sent = [each for op in reading.forward_ops if (each := _sent(reading, op)) is not None]
    edges = [(each.source, each.to, each) for each in sent if each.source is not None]
    ways = {_way(source, to) for source, to, _ in edges}
    if len(ways) != 1 or 0 in ways or len({each.rows for _, _, each in edges}) != 1:
        return None
    source, to, first = edges[0]
    if len(to) < MIN_PAIRS or first.rows < MIN_NODES or not _are_any_pairs(source, to, first.rows):
        return None
    low, high = ("lower", "higher") if ways == {1} else ("higher", "lower")
    return Found(
        sites=(first.op.module or "(model)", "(data)"),
        evidence=(
            fact("edges", len(to)),
            fact(f"of them from a {low} to a {high} number", len(to)),
            fact("nodes", first.rows),
        ),
        cause=f"All {len(to)} edges lead from a node with a {low} number to one with a {high} number"
        f"{reading.where(first.op)}, though the ends are spread as those of any pairs: each pair of neighbours is "
        "listed once, and messages pass in one direction only.",
    )


MIN_PAIRS: Final = 200
MIN_NODES: Final = 30
SPREAD = Threshold(4.0, "standard errors between the mean ends of edges and those of pairs of any two nodes in order")


def _way(source: _Ids, to: _Ids) -> int:
    """Return 1 if all edges lead upwards, -1 if all lead downwards, else 0."""
    return 1 if bool((source < to).all()) else -1 if bool((source > to).all()) else 0


def _are_any_pairs(source: _Ids, to: _Ids, nodes: int) -> bool:
    """Return whether the lower ends lie around a third of all numbers, and the higher ones around two thirds."""
    low, high = np.minimum(source, to) / nodes, np.maximum(source, to) / nodes
    error = np.sqrt(1 / 18 / len(low))
    off = max(abs(float(low.mean()) - 1 / 3), abs(float(high.mean()) - 2 / 3))
    spread = [float(each.var()) * 18 for each in (low, high)]
    return off < SPREAD * error + 1 / nodes and all(0.75 < each < 1.33 for each in spread)


def _overlap(reading: TapeReading, op: Op, pool: _Sent, crossing: float, *, within_first: bool) -> Found:
    what = (
        f"all edges lie among the first {int(np.bincount(pool.to).max())} nodes"
        if within_first
        else f"{crossing:.0%} of the edges lead from one graph into another"
    )
    return Found(
        severity="critical",
        sites=(op.module or "(model)", "(data)"),
        evidence=(
            fact("graphs of the batch", pool.rows),
            above("share of edges that lead into another graph", crossing, CROSSING)
            if not within_first
            else fact("nodes of the batch", len(pool.to)),
        ),
        cause=f"The batch holds {pool.rows} graphs, and {what}{reading.where(op)}: the numbers of nodes in the edges "
        "were not moved by the number of nodes in all graphs before.",
        fix="Add the running sum of the sizes to the edges of each graph: offsets = torch.cumsum(sizes, 0) - sizes; "
        "edges = torch.cat([e + o for e, o in zip(edges, offsets)], 1).",
        refute="Print the graph of both ends of a few edges: if they are equal, this finding is wrong.",
    )


def _numbers_graphs(pool: _Sent) -> bool:
    """Return whether rows are numbered in order, several in a row, as the nodes of one graph after another are."""
    return (
        pool.rows >= MIN_GRAPHS
        and len(pool.to) > 2 * pool.rows
        and bool((np.diff(pool.to) >= 0).all())
        and len(np.unique(pool.to)) == pool.rows
    )


def _sent(reading: TapeReading, op: Op) -> _Sent | None:
    if op.kind.removesuffix("_") not in _SCATTERS or op.args.get("dim", 0) != 0 or not op.outs:
        return None
    shape = reading.tape.values[op.outs[0]].shape
    to, given = _ids(reading, op), op.input("source") or op.input("src") or op.input("values")
    if to is None or given is None or not shape or reading.tape.values[given].shape[:1] != (len(to),):
        return None
    gathered = _gathered(reading, given, shape[0], len(to))
    if gathered is not None:
        return _Sent(op, shape[0], to, gathered)
    return _Sent(op, shape[0], to, None)


def _gathered(reading: TapeReading, value: int, rows: int, count: int) -> _Ids | None:
    """Return which of so many rows a value of so many was made of: those of the nodes that edges come from."""
    for each in sorted(reading.tape.ancestors(value), reverse=True):
        op = reading.tape.producer(each)
        if op is None or op.kind not in _GATHERS or reading.tape.values[each].shape[:1] != (count,):
            continue
        table = op.input("self")
        if table is None or reading.tape.values[table].shape[:1] != (rows,) or op.args.get("dim", 0) != 0:
            continue
        ids = _ids(reading, op)
        if ids is not None and len(ids) == count:
            return ids
    return None


def _ids(reading: TapeReading, op: Op) -> _Ids | None:
    """Return the rows that an operation takes or adds to, the same in all columns."""
    chosen = [each for name in ("indices", "index") for each in references(op.args.get(name))]
    content = reading.numbers.of(chosen[0]) if len(chosen) == 1 else None
    if content is None or content.dtype.kind not in "iu" or not content.ndim or not content.size:
        return None
    flat = content.reshape(len(content), -1)
    return flat[:, 0].astype(np.int64) if (flat == flat[:, :1]).all() else None
