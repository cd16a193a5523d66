"""Plotly, asked for at the moment something is drawn and not before."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from sonde.errors import MissingExtra

if TYPE_CHECKING:
    import plotly.graph_objects

Figure: TypeAlias = "plotly.graph_objects.Figure"


def graph_objects() -> Any:
    """Return the module that figures are made of.

    Raises:
        MissingExtra: Plotly is not installed.

    """
    return _plotly("graph_objects")


def subplots() -> Any:
    """Return the module that puts several plots into one figure."""
    return _plotly("subplots")


def plotly_js() -> str:
    """Return the script that draws figures in a browser, as the installed package carries it."""
    script: str = _plotly("offline").get_plotlyjs()
    return script


def _plotly(module: str) -> Any:
    try:
        return import_module(f"plotly.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("plotly"):
            raise
        raise MissingExtra("plotly", "view", "Drawing figures") from None
