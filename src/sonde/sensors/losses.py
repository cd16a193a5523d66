"""Sensors for what a loss function is given: its input by rows and by columns, and shapes that were broadcast."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from sonde.core.facts import ColumnFacts
from sonde.core.signals import (
    COLUMN_LOG_Z,
    COLUMN_SUM,
    LOG_Z,
    LOSS,
    PREDICTED_ENTROPY,
    ROW_MIN,
    ROW_SUM,
    SAMPLE_SPREAD,
    ZERO_SHARE,
)
from sonde.hooks.autograd_graph import children_of, name_of, shape_of
from sonde.schedule import at, every, first
from sonde.sensors.graph import LAYERS, loss_part
from sonde.sensors.loss_functions import LossCall
from sonde.sensors.sensor import Graph, Sensor
from sonde.sensors.targets import entropy_of, spread_of, tally
from sonde.sensors.tensors import MAX_ELEMENTS, is_real, spread_rows

MAX_FOUND: Final = 4
_MAX_CHAIN: Final = 12
_PAIRED: Final = {"AddBackward0": "add", "DivBackward0": "div", "MulBackward0": "mul", "SubBackward0": "sub"}
# Operations that leave a column a column without having made it one.
_ELEMENTWISE: Final = (
    *("AbsBackward0", "AddBackward0", "ClampBackward1", "ClampMinBackward0", "DivBackward0", "ExpBackward0"),
    *("HuberLossBackward0", "LogBackward0", "LogSigmoidBackward0", "MseLossBackward0", "MulBackward0", "NegBackward0"),
    *("PowBackward0", "ReluBackward0", "RsubBackward1", "SigmoidBackward0", "SmoothL1LossBackward0", "SubBackward0"),
    *("SoftplusBackward0", "TanhBackward0", "BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0"),
)


class LossInputs(Sensor):
    """Sums, smallest values and spread of what a loss receives. Counts the calls of a loss."""

    produces = (
        ROW_SUM,
        ROW_MIN,
        COLUMN_SUM,
        ZERO_SHARE,
        SAMPLE_SPREAD,
        PREDICTED_ENTROPY,
        LOG_Z,
        COLUMN_LOG_Z,
    )
    # An odd period: where two optimizers take turns, an even one would only ever see one of them.
    when = first(10) | every(21)
    cost = "a few passes over at most 256 rows of the loss's input"

    @torch.no_grad()
    def on_loss(self, call: LossCall) -> None:
        """Look at the input of the loss."""
        if self.is_look(call.number) and is_real(call.values) and call.values.numel():
            self._see_values(call)

    def _see_values(self, call: LossCall) -> None:
        values, dim = call.values.detach(), call.class_dim
        if values.dim() and len(values) > 1:
            self._write(SAMPLE_SPREAD, spread_of(values), call)
        if dim is None:
            return
        rows = spread_rows(values, dim).float()
        self._write(ROW_SUM, rows.sum(1), call)
        self._write(ROW_MIN, rows.amin(1), call)
        self._write(ZERO_SHARE, (rows == 0).float().mean(), call)
        logarithmic = call.kind in ("cross_entropy", "nll_loss")
        if values.dim() == 2 and values.numel() <= MAX_ELEMENTS:
            self._write(COLUMN_SUM, values.float().sum(0), call)
            if logarithmic:
                self._write(COLUMN_LOG_Z, values.float().logsumexp(0), call)
        if logarithmic:
            self._write(LOG_Z, rows.logsumexp(1), call)
        if call.classes and call.classes > 1:
            self._write(PREDICTED_ENTROPY, entropy_of(tally(rows.argmax(1), call.classes)), call)

    def _write(self, name: str, values: Tensor, call: LossCall) -> None:
        self.signals.see(LOSS, name, values, call=call.number)


class BlownUpColumns(Sensor):
    """A column of the loss, made by a layer, that was broadcast with a row of data to all pairs."""

    produces = ("facts.columns",)
    when = at(0)
    cost = "a walk over the loss's part of the graph of the first backward pass"

    def on_graph(self, graph: Graph) -> None:
        """Find them."""
        self.context.book.add(columns=tuple(read_columns(graph.root)))


def read_columns(root: Tensor) -> list[ColumnFacts]:
    """Return where a column that a layer made was broadcast with a row of data within the loss."""
    found: list[ColumnFacts] = []
    for node in loss_part(root):
        children = [child for child in children_of(node) if child is not None]
        if name_of(node) not in _PAIRED or len(children) != 1 or len(found) >= MAX_FOUND:
            continue
        column, result = shape_of(children[0]), shape_of(node)
        if column is None or len(column) != 2 or column[0] < 2:
            continue
        if column[1] == 1 and result == (column[0], column[0]) and _comes_from_a_layer(children[0], column):
            found.append(ColumnFacts(operation=_PAIRED[name_of(node)], column=column, result=result))
    return found


def _comes_from_a_layer(node: Any, column: tuple[int, ...]) -> bool:
    """Return whether a column comes from a layer with one output, rather than from a deliberate reshape."""
    for _ in range(_MAX_CHAIN):
        if name_of(node) in LAYERS:
            return True
        children = [child for child in children_of(node) if child is not None]
        if name_of(node) not in _ELEMENTWISE or len(children) != 1 or shape_of(children[0]) != column:
            return False
        node = children[0]
    return False
