"""Variables whose autograd graph reaches back over many steps: `total += loss`, a hidden state never detached."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from sonde.hooks.source_search import feeding_lines
from sonde.hooks.user_line import Line
from sonde.probes.leaks_holders import user_frames

_MOST_NODES: Final = 50_000
_LEAST_USES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LongGraph:
    """A variable and how many times its graph uses the same parameter."""

    name: str
    scope: str
    uses: int
    lines: tuple[Line, ...]


def find_long_graph(steps: int) -> LongGraph | None:
    """Return the variable of a running function whose graph uses one parameter about once for every step."""
    needed = max(_LEAST_USES, steps // 2)
    for frame in user_frames():
        for name, value in list(frame.f_locals.items()):
            if issubclass(type(value), Tensor) and value.grad_fn is not None:
                uses = _most_uses(value.grad_fn)
                if uses >= needed:
                    lines = feeding_lines(frame.f_code.co_filename, name, frame.f_code.co_firstlineno)
                    return LongGraph(name=name, scope=f"{frame.f_code.co_name}()", uses=uses, lines=tuple(lines))
    return None


def _most_uses(root: Any) -> int:
    """Return how often the most used leaf of a graph is used."""
    uses: Counter[Any] = Counter()
    seen, stack = {root}, [root]
    while stack and len(seen) < _MOST_NODES:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            if type(node).__name__ == "AccumulateGrad":
                uses[node] += 1
            elif node not in seen:
                seen.add(node)
                stack.append(node)
    return max(uses.values(), default=0)
