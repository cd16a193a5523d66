"""Show what debuggers captured of one sample: numbers in a table, tensors as pictures.

    captured = sonde.load_debug_outputs("runs/digits/epoch_4/debugger")
    display_debug_outputs(captured[17])     # the last line of a notebook's cell

`sonde view` shows the same of all samples, with their inputs, labels and scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from sonde.analysis import Values
from sonde.errors import OptionError
from sonde.store import BatchValue
from sonde.views.document import Document, Figures, Section, Table
from sonde.views.figures.curves import as_values
from sonde.views.figures.theme import DIVERGING, SEQUENTIAL, Figure, Theme, empty, finish, graph_objects, subplots
from sonde.views.notebook import DocumentView
from sonde.views.terminal.style import short

_MOST_PLANES: Final = 9
_MOST_PIXELS: Final = 128  # of one side; beyond, rows and columns are skipped
_MOST_LISTED: Final = 16
_MOST_LEAVES: Final = 500
_MOST_DEPTH: Final = 16


def display_debug_outputs(
    outputs: Mapping[str, Any], *, title: str = "Debug outputs", theme: Theme = "light"
) -> DocumentView:
    """Return what debuggers captured of one sample as a document that notebooks display.

    Args:
        outputs: By debugger: `load_debug_outputs(folder)[sample]`, or what a debugger returned.
        title: The title of the document.
        theme: `light` or `dark`.

    Raises:
        OptionError: It is not a mapping of debuggers to outputs.

    """
    if not isinstance(outputs, Mapping):
        raise OptionError(
            f"Outputs are shown by debugger, such as load_debug_outputs(folder)[17]; got {type(outputs).__name__}."
        )
    sections = [_section(str(name), outputs[name], theme) for name in outputs]
    return DocumentView(Document(title, sections))


def _section(name: str, output: Any, theme: Theme) -> Section:
    rows, planes = [], []
    for number, (path, leaf, note) in enumerate(_leaves(output)):
        if number == _MOST_LEAVES:
            rows.append(["…", "more values are not shown", ""])
            break
        array = _as_array(leaf)
        if array is None:
            rows.append([path, str(leaf)[:400], note])
        elif array.size <= _MOST_LISTED:
            rows.append([path, _listed(array), note])
        else:
            rows.append([path, _summary(array), note])
            planes.append((" ".join(filter(None, (path or name, note))), array))
    blocks: list[Table | Figures] = [Table(["name", "value", "note"], rows)] if rows else []
    if planes:
        blocks.append(Figures(lambda: [_draw(label, array, theme) for label, array in planes]))
    return Section(name, blocks)


def _leaves(value: Any, path: str = "", note: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield what a nested value holds, each with its path and what has to be known about it."""
    if isinstance(value, BatchValue):
        yield from _leaves(value.value, path, f"of the whole batch of {len(value.samples)} samples")
        return
    inside: list[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping):
        inside = list(value.items())
    elif isinstance(value, list | tuple) and not all(isinstance(each, int | float) for each in value):
        inside = list(enumerate(value))
    if inside is None or path.count("/") >= _MOST_DEPTH:
        yield path, value, note
        return
    for key, item in inside:
        yield from _leaves(item, f"{path}/{key}" if path else str(key), note)


def _as_array(leaf: Any) -> Values | None:
    if leaf is None or isinstance(leaf, str | bytes):
        return None
    try:
        return as_values(leaf)
    except OptionError:
        return None


def _listed(array: Values) -> str:
    numbers = [f"{each:.0f}" if each.is_integer() else short(each) for each in array.reshape(-1).tolist()]
    return numbers[0] if array.ndim == 0 else f"[{', '.join(numbers)}]"


def _summary(array: Values) -> str:
    finite = array[np.isfinite(array)]
    shape = " x ".join(map(str, array.shape))
    if not finite.size:
        return f"{shape}: no finite element"
    bad = f", {array.size - finite.size:,} not finite" if finite.size < array.size else ""
    return f"{shape}: {short(finite.min())} to {short(finite.max())}, mean {short(finite.mean())}{bad}"


def _draw(label: str, array: Values, theme: Theme) -> Figure:
    """Draw the planes of a tensor that are most active; of a vector its elements."""
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    if not np.isfinite(array).any():
        return empty(label, "There is no finite element.", theme=theme)
    if array.ndim == 1:
        figure = graph_objects().Figure(graph_objects().Bar(y=array.astype(np.float32)))
        return finish(figure, label, f"{array.size:,} elements", theme=theme)
    planes = array.reshape(-1, *array.shape[-2:])
    activity = np.abs(np.nan_to_num(planes, nan=0.0, posinf=0.0, neginf=0.0)).mean((1, 2))
    chosen = np.sort(np.argsort(-activity, kind="stable")[:_MOST_PLANES])
    return _panels(label, planes[chosen], [int(each) for each in chosen], len(planes), theme)


def _panels(label: str, planes: Values, chosen: list[int], count: int, theme: Theme) -> Figure:
    columns = min(3, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    titles = [f"plane {each}" for each in chosen] if count > 1 else None
    figure = subplots().make_subplots(rows=rows, cols=columns, subplot_titles=titles, vertical_spacing=0.3 / (rows + 1))
    high, wide = (max(1, -(-length // _MOST_PIXELS)) for length in planes.shape[1:])
    shown = np.where(np.isfinite(planes), planes, np.nan)[:, ::high, ::wide].astype(np.float32)
    for at, plane in enumerate(shown):
        row, column = divmod(at, columns)
        figure.add_trace(graph_objects().Heatmap(z=plane, coloraxis="coloraxis"), row=row + 1, col=column + 1)
        figure.update_yaxes(autorange="reversed", row=row + 1, col=column + 1)
    limit = float(np.nanmax(np.abs(shown)))
    signed = bool(np.nanmin(shown) < 0)
    colour = {"colorscale": DIVERGING, "cmin": -limit, "cmax": limit} if signed else {"colorscale": SEQUENTIAL}
    figure.update_layout(coloraxis=colour | {"colorbar": {"thickness": 12, "outlinewidth": 0}})
    note = " x ".join(map(str, planes.shape[1:]))
    note += f", the {len(chosen)} most active of {count} planes" if len(chosen) < count else ""
    return finish(figure, label, note, theme=theme, height=80 + 240 * rows)
