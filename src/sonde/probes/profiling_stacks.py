"""Stacks with the time spent in them, for flame graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from sonde.probes.module_times import ModuleTime
from sonde.probes.profiling_tree import Frame, OperatorCall, ProfileTree


def stack_weights(trees: Iterable[ProfileTree]) -> dict[tuple[str, ...], float]:
    """Return microseconds of the operators' own time by stack, outermost first; empty if no stacks were recorded."""
    weights: dict[tuple[str, ...], float] = defaultdict(float)
    for tree in trees:
        for call in tree.calls:
            if call.stack:
                weights[_stack(call)] += call.self_ns / 1e3
    return dict(weights)


def module_weights(modules: Iterable[ModuleTime]) -> dict[tuple[str, ...], float]:
    """Return microseconds of modules' own time by path; what stands in where there are no stacks."""
    weights: dict[tuple[str, ...], float] = {}
    for row in modules:
        path = tuple(row.name.split("."))
        weights["forward", *path] = row.self_forward_ms * 1e3
        if row.backward_ms is not None and not any(other.name.startswith(f"{row.name}.") for other in modules):
            weights["backward", *path] = row.backward_ms * 1e3
    return weights


def _stack(call: OperatorCall) -> tuple[str, ...]:
    frames: list[Frame] = [frame for frame in reversed(call.stack) if frame.file]
    parts = [f"{frame.function} ({frame})" for frame in frames]
    return (*parts, *([call.parent] if call.parent else []), call.name)
