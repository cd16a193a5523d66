"""Write pages as pickles, for older tools."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from sonde.capture.capture import Capture
from sonde.capture.values import map_leaves, num_bytes
from sonde.errors import MissingExtra, RunExists
from sonde.store.pages import BatchValue, load_debug_outputs
from sonde.store.pages.record import Datapoint, check_datapoint


def write_legacy_pages(
    folder: str | Path, captures: Iterable[tuple[Datapoint, Mapping[str, Any]]], *, page_bytes: int
) -> int:
    """Write captures as `page_N.pkl`, for older tools. Such files run code when they are loaded.

    Returns:
        How many pages were written.

    Raises:
        RunExists: The folder holds such pages already.

    """
    try:
        joblib = import_module("joblib")
    except ImportError:
        raise MissingExtra("joblib", "legacy", "Writing legacy pages") from None
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.glob("page_*.pkl")):
        raise RunExists(f"{path} holds legacy pages already. Choose another folder.")
    page: dict[Datapoint, Any] = {}
    held, number = 0, 0
    for datapoint, outputs in captures:
        plain = {name: map_leaves(value, _to_host) for name, value in outputs.items()}
        page[check_datapoint(datapoint)] = plain
        held += num_bytes(plain)
        if held >= page_bytes:
            joblib.dump(page, path / f"page_{number}.pkl")
            page, held, number = {}, 0, number + 1
    if page:
        joblib.dump(page, path / f"page_{number}.pkl")
        number += 1
    return number


def _to_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def write_pickled_pages(capture: Capture, folder: str | Path, *, page_bytes: int) -> None:
    """Write waiting captures as `page_N.pkl`, through pages in a temporary folder, so that memory stays bounded."""
    with tempfile.TemporaryDirectory(prefix="sonde-pickle-") as scratch:
        capture.open(scratch)
        capture.seal()
        captured = load_debug_outputs(scratch, tensors="torch")
        items = ((name, {key: _plain(value) for key, value in captured[name].items()}) for name in captured)
        write_legacy_pages(folder, items, page_bytes=page_bytes)


def _plain(value: Any) -> Any:
    """Return a value in which nothing but plain Python marks what was computed over a whole batch."""
    if isinstance(value, BatchValue):
        return {"scope": "batch", "value": value.value, "samples": list(value.samples)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value
