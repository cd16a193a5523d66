"""Find layers by the names that users know."""

from __future__ import annotations

from difflib import get_close_matches

from torch import nn

from sonde.hooks.names import named_modules, unwrap
from sonde.select import check_each_matches


def get_layer_by_name(model: nn.Module, layer_name: str) -> nn.Module | None:
    """Return the module with this name, or None if there is none.

    Names are those of the model as it was written: what DistributedDataParallel, FSDP or `torch.compile` put before
    and between them may be there or not. Attributes that are no modules do not count. The empty name is the model.

    >>> get_layer_by_name(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "1")
    ReLU()
    >>> get_layer_by_name(nn.Linear(2, 2), "weight") is None
    True
    """
    if layer_name == "":
        return unwrap(model)
    exact = dict(model.named_modules(remove_duplicate=False)).get(layer_name)
    return exact if exact is not None else _names(model).get(layer_name)


def require_layer(model: nn.Module, layer_name: str) -> nn.Module:
    """Return the module with this name.

    Raises:
        SelectionError: There is none; the message names the nearest.

    """
    layer = get_layer_by_name(model, layer_name)
    if layer is None:
        kinds = {name: type(module).__name__ for name, module in _names(model).items()}
        check_each_matches(_literally(layer_name), kinds, type(unwrap(model)).__name__)
    assert layer is not None
    return layer


def nearest_layers(model: nn.Module, layer_name: str) -> list[str]:
    """Return the names of layers that one that is not there may have meant."""
    return get_close_matches(layer_name, _names(model), n=3)


def _literally(name: str) -> str:
    # A name may hold what a glob takes for a pattern; in brackets it stands for itself.
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _names(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for first, module, aliases in named_modules({"": model}) for name in (first, *aliases) if name}
