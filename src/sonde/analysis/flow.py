"""Gradient flow: how large gradients are, and how far each layer moves, from the first layer to the last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sonde.analysis.order import ModelOrder, layer_of
from sonde.analysis.summary import SiteSummary
from sonde.analysis.unusual import Mark


@dataclass(frozen=True, slots=True)
class FlowRow:
    """One layer: the recent rms of its weight's gradient, and its recent update ratio; NaN where not recorded."""

    name: str
    kind: str
    gradient: float
    ratio: float
    mark: Mark


def gradient_flow(summaries: Iterable[SiteSummary], order: ModelOrder) -> list[FlowRow]:
    """Return the layers that have gradients, in model order.

    Weights stand for their layer. Layers that have only vectors (norms, biases) are left out where others have
    matrices, because their gradients live on another scale.
    """
    gradients: dict[str, list[SiteSummary]] = {}
    ratios: dict[str, SiteSummary] = {}
    for row in summaries:
        if row.site.quantity == "gradient":
            gradients.setdefault(layer_of(row.site), []).append(row)
        elif row.site.quantity == "update":
            ratios[row.site.name] = row
    matrices = {name: [row for row in rows if len(row.site.shape) > 1] for name, rows in gradients.items()}
    chosen = {name: rows for name, rows in matrices.items() if rows} or gradients
    flow = [_row(name, rows, ratios, order) for name, rows in chosen.items()]
    return sorted(flow, key=lambda row: order.of_layer(row.name))


def _row(name: str, rows: list[SiteSummary], ratios: dict[str, SiteSummary], order: ModelOrder) -> FlowRow:
    # Several matrices in one module (an LSTM, attention with packed projections): the strongest is what arrives.
    strongest = max(rows, key=lambda row: row.now)
    moved = ratios.get(strongest.site.name)
    worst = min(rows, key=lambda row: row.mark.sort_key).mark
    kind = order.kind(name) or strongest.site.kind
    return FlowRow(name, kind, strongest.now, moved.now if moved else float("nan"), worst)
