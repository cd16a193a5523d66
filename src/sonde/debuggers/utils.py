"""Find layers by name."""

from __future__ import annotations

from difflib import get_close_matches

from torch import nn

from sonde.hooks.names import named_modules, unwrap
from sonde.select import check_each_matches


def get_layer_by_name(model: nn.Module, layer_name: str) -> nn.Module | None:
    """Return the module with this name, or None.

    Names are those of the model as it was written, with or without the prefixes of DistributedDataParallel, FSDP and
    `torch.compile`. Attributes that are not modules do not count. The empty name is the model itself.

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
        SelectionError: It does not exist; the message names close matches.

    """
    layer = get_layer_by_name(model, layer_name)
    if layer is None:
        kinds = {name: type(module).__name__ for name, module in _names(model).items()}
        check_each_matches(_literally(layer_name), kinds, type(unwrap(model)).__name__)
    assert layer is not None
    return layer


def nearest_layers(model: nn.Module, layer_name: str) -> list[str]:
    """Return close matches of a name that does not exist."""
    return get_close_matches(layer_name, _names(model), n=3)


def _literally(name: str) -> str:
    # A name may hold characters that are special in a glob; in brackets they are literal.
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _names(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for first, module, aliases in named_modules({"": model}) for name in (first, *aliases) if name}
