"""Build debuggers from their descriptions, and check the layers they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from sonde.debuggers.base_debugger import BaseDebugger
from sonde.debuggers.forward_debugger import ForwardDebugger
from sonde.debuggers.utils import get_layer_by_name, nearest_layers, require_layer
from sonde.errors import OptionError
from sonde.training.config import build_from_config


class DuplicateName(OptionError, AssertionError):
    """Two debuggers have the same name."""


def build_debuggers(config: Iterable[Any]) -> dict[str, BaseDebugger]:
    """Return the described debuggers by name, in their order; an instance is used as it is.

    Raises:
        DuplicateName: A name comes twice.
        OptionError: An item has no name or no debugger, or one that cannot be called.

    """
    built: dict[str, BaseDebugger] = {}
    if isinstance(config, str) or not isinstance(config, Iterable):
        raise OptionError(
            f"Debuggers are described by a list of {{'name': ..., 'debugger_config': ...}}; got {config!r:.80}."
        )
    for item in [config] if isinstance(config, Mapping) else config:
        if not isinstance(item, Mapping) or not {"name", "debugger_config"} <= set(item):
            raise OptionError(f"A debugger is described as {{'name': ..., 'debugger_config': ...}}; got {item!r:.200}.")
        name = item["name"]
        if name in built:
            raise DuplicateName(f"Duplicate debugger name: {name}")
        built[name] = _built(name, item["debugger_config"])
    return built


def _built(name: str, described: Any) -> BaseDebugger:
    try:
        debugger = build_from_config(described)
    except Exception as error:
        error.add_note(f"This happened while building the debugger {name!r} from {described!r:.200}.")
        raise
    if not callable(debugger):
        kind = f"has the keys {sorted(map(str, debugger))}" if isinstance(debugger, Mapping) else f"is {debugger!r:.80}"
        raise OptionError(
            f"The debugger {name!r} {kind}; give a debugger, or describe one as {{'class': ..., 'args': {{...}}}}."
        )
    made: BaseDebugger = debugger
    return made


def by_layer(debuggers: Iterable[ForwardDebugger]) -> dict[str, list[ForwardDebugger]]:
    """Return forward debuggers by their layer."""
    layers: dict[str, list[ForwardDebugger]] = {}
    for debugger in debuggers:
        layers.setdefault(debugger.layer_name, []).append(debugger)
    return layers


def check_layers(model: nn.Module, layers: Mapping[str, list[ForwardDebugger]], *, strict: bool) -> None:
    """Print the layers that do not exist or, if `strict`, raise for the first of them.

    Raises:
        SelectionError: A layer does not exist, and `strict` is set.

    """
    for layer_name, debuggers in layers.items():
        if strict:
            require_layer(model, layer_name)
        elif get_layer_by_name(model, layer_name) is None:
            kinds = ", ".join(type(each).__name__ for each in debuggers)
            near = nearest_layers(model, layer_name)
            hint = f" Nearest: {', '.join(near)}." if near else ""
            message = (
                f"Warning: Could not find layer '{layer_name}' for debugger {kinds}; it will capture nothing.{hint}"
            )
            print(message)  # noqa: T201 - documented: printed unless strict=True
