"""Names as the user wrote them: wrappers' prefixes are stripped, tied tensors keep all their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from torch import nn

T = TypeVar("T")

# Modules that only wrap the user's module, and the attribute it is in, which torch puts into names.
_COMPILED: Final = "OptimizedModule"
_WRAPPED_AS: Final = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_forward_module",
    _COMPILED: "_orig_mod",
}
# Fabric's wrapper holds the user's module twice.
_WRAPPERS: Final = {*_WRAPPED_AS.values(), "_original_module"}

# The model itself, which torch calls "". No attribute can have this name.
ROOT_NAME: Final = "(model)"


def plain_name(name: str, module_owns: frozenset[str] = frozenset()) -> str:
    """Strip the path parts that wrappers add.

    >>> plain_name("module._orig_mod.encoder.0.weight")
    'encoder.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS or part in module_owns)


def own_wrapper_words(root: nn.Module) -> frozenset[str]:
    """Return those wrapper words that the user's own modules use as attribute names, which must not be stripped."""
    words = set()
    for module in root.modules():
        if not is_wrapper(module):
            words |= _WRAPPERS.intersection(dict(module.named_children()))
    return frozenset(words)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module only wraps the user's module."""
    return type(module).__name__ in _WRAPPED_AS


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether a module is what `torch.compile` made of another one."""
    return type(module).__name__ == _COMPILED


def unwrap(module: nn.Module, *, also_compiled: bool = True) -> nn.Module:
    """Return the user's module inside any number of wrappers; of compiled code, the part outside it."""
    while is_wrapper(module) and (also_compiled or not is_compiled_wrapper(module)):
        inner = module._modules.get(_WRAPPED_AS[type(module).__name__])
        if inner is None:
            return module
        module = inner
    return module


def named_modules(roots: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """Yield every module once: its plain name, itself, and its other names if it is shared."""
    return _named_once(roots, lambda root: root.named_modules(remove_duplicate=_contains_itself(root)))


def named_parameters(roots: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter, tuple[str, ...]]]:
    """Yield every parameter once: its plain name, itself, and its other names if it is tied."""
    return _named_once(roots, lambda root: root.named_parameters(remove_duplicate=_contains_itself(root)))


def _contains_itself(module: nn.Module) -> bool:
    """Return whether any module is a part of itself: it has names without end, of which torch yields the first."""
    done: set[int] = set()
    path: set[int] = set()

    def visit(each: nn.Module) -> bool:
        if id(each) in path or id(each) in done:
            return id(each) in path
        path.add(id(each))
        found = any(visit(child) for child in each._modules.values() if child is not None)
        path.discard(id(each))
        done.add(id(each))
        return found

    return visit(module)


def _named_once(
    roots: dict[str, nn.Module], walk: Callable[[nn.Module], Iterator[tuple[str, T]]]
) -> Iterator[tuple[str, T, tuple[str, ...]]]:
    names: dict[int, list[str]] = {}
    found: dict[int, T] = {}
    for prefix, root in roots.items():
        keep = own_wrapper_words(root)
        for name, each in walk(root):
            full = _join(prefix, plain_name(name, keep))
            found[id(each)] = each
            known = names.setdefault(id(each), [])
            if full not in known:
                known.append(full)
    for key, each in found.items():
        yield names[key][0], each, tuple(names[key][1:])


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name or ROOT_NAME
