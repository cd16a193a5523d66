"""Which arguments the `forward` of a module never reads, whatever it is given."""

from __future__ import annotations

import dis
import functools
from types import CodeType, FunctionType
from typing import Final

from torch import nn

_READS: Final = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "MAKE_CELL")
"""Parts of the names of instructions that read a variable; some do so beside writing to another."""


def unread_arguments(module: nn.Module) -> tuple[str, ...]:
    """Return the arguments of a module's `forward` that its code never reads, by name and by place: `t`, `[1]`.

    Only of modules that are not torch's own, which keep arguments for compatibility.

    >>> class Denoiser(nn.Module):
    ...     def forward(self, x, t, scale=1.0):
    ...         return scale * x
    >>> unread_arguments(Denoiser()), unread_arguments(nn.Linear(1, 1))
    (('t', '[1]'), ())
    """
    kind = type(module)
    forward = vars(module).get("forward", kind.forward)
    if kind.__module__.partition(".")[0] == "torch" or not isinstance(forward, FunctionType):
        return ()
    return _unread(forward.__code__)


@functools.lru_cache(maxsize=4096)
def _unread(code: CodeType) -> tuple[str, ...]:
    if "locals" in code.co_names or "vars" in code.co_names or "super" in code.co_names:
        return ()
    read: set[str] = set()
    for each in dis.get_instructions(code):
        if any(part in each.opname for part in _READS):
            read.update(each.argval if isinstance(each.argval, tuple) else (str(each.argval),))
    places = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    found = []
    for place, name in enumerate(places):
        if name not in read and name not in code.co_cellvars and not name.startswith("_"):
            found += [name, f"[{place}]"] if place < code.co_argcount - 1 else [name]
    return tuple(found)
