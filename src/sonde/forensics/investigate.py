"""Find the first bad operation of the present step: which stage, which operation, which line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sonde.forensics.keeper import KeptPass
from sonde.forensics.loss_graph import GraphNode, find_loss_origin, graph_of
from sonde.forensics.origin import Incident, Origin, of_values, origin_of
from sonde.forensics.repeat import repeat_alone
from sonde.forensics.trace import Given, Root
from sonde.forensics.traps import LossTail, LossTails
from sonde.forensics.values import badness, first_indices, local_part, samples
from sonde.hooks.source_search import computed_at, find_call
from sonde.hooks.user_line import Line, users_frame


def investigate_loss(
    roots: tuple[Tensor, ...], passes: list[KeptPass], names: dict[int, str], frame: FrameType | None
) -> Incident:
    """Find why a loss is not finite, just before its backward pass."""
    outputs: list[tuple[str, Tensor]] = []
    for kept in passes:
        looked = _look_at_forward(kept, names, roots, frame)
        outputs = looked.outputs
        if looked.origin is not None:
            return Incident(looked.origin, kept, outputs)
    last = passes[-1] if passes else None
    found = find_loss_origin(roots, last, _outputs(last))
    if found is None:
        return Incident(_between(last, outputs, frame), last, outputs)
    origin, node = found
    operands = {name: tensor for name, tensor, _ in node.inputs if tensor is not None}
    made = _computed(origin, operands.get(origin.tensor), frame)
    return Incident(made or _with_line(origin, node, roots, last, frame), last, outputs, operands)


def _computed(origin: Origin, tensor: Tensor | None, frame: FrameType | None) -> Origin | None:
    """Return the line of the loop that computed a tensor all of which is bad: then the data is not.

    None if the tensor is not known, or some of it is finite, as where single samples hold NaN.
    """
    user = users_frame(frame)
    if origin.stage != "data" or user is None or tensor is None or origin.count < origin.total:
        return None
    found = computed_at(user, tensor)
    if found is None:
        return None
    line, calls = found
    spread = next((name for name in ("std", "var") if name in calls), "") if tensor.numel() == 1 else ""
    op = f"aten.{spread}" if spread else ""
    return replace(origin, stage="loss", op=op, call=spread, tensor="", line=line, inputs=[], samples=[])


def _between(kept: KeptPass | None, repeated: list[tuple[str, Tensor]], frame: FrameType | None) -> Origin:
    """Describe a loss whose operation is unknown: it lies behind the model's call if what that returned is finite."""
    called = None if kept is None else kept.called_at
    # What the call returned may have been changed in place since; called again, it shows what the model itself makes.
    outputs = [tensor for _, tensor in repeated] or _outputs(kept)
    if called is None or not outputs or any(badness(output) for output in outputs):
        return Origin(stage="loss", repeated=False, line=called)
    user = users_frame(frame)
    seen = None if user is None else Line(user.f_code.co_filename, user.f_lineno)
    return Origin(stage="loss", repeated=False, after=called, before=seen)


def investigate_output(kept: KeptPass, names: dict[int, str]) -> Incident | None:
    """Find why the output of a pass is not finite, without a loss."""
    looked = _look_at_forward(kept, names, (), None)
    return None if looked.origin is None else Incident(looked.origin, kept, looked.outputs)


def investigate_gradients(
    passes: list[KeptPass], tails: LossTails, names: dict[int, str], frame: FrameType | None
) -> Incident | None:
    """Find why gradients are not finite, before the optimizer steps."""
    for kept in passes:
        if not kept.gradients and not kept.lacks_gradients:
            continue
        repetition = repeat_alone(kept, names, backward=True)
        if repetition is None:
            continue
        root = repetition.forward_root() or repetition.backward_root()
        if root is not None:
            return Incident(_of_root(root, kept), kept, repetition.outputs)
        if any(badness(gradient) for gradient in kept.gradients.values()):
            origin, operands = _loss_backward(kept, tails, frame)
            return Incident(origin, kept, repetition.outputs, operands)
    return None


def investigate_update(optimizer: Optimizer, name: str, parameter: Tensor) -> Origin:
    """Describe a parameter that the optimizer made non-finite out of finite gradients."""
    group = next((each for each in optimizer.param_groups if any(other is parameter for other in each["params"])), {})
    settings = {key: group[key] for key in ("lr", "eps", "momentum", "betas", "weight_decay") if key in group}
    plain = {key: value for key, value in settings.items() if isinstance(value, int | float | tuple)}
    about = of_values(local_part(parameter.detach()), badness(parameter), [], None)
    return replace(
        about,
        stage="optimizer",
        op=f"{type(optimizer).__name__}.step",
        module=name.rpartition(".")[0],
        tensor=name,
        scalars={key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()},
        samples=[],
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Looked:
    """What a repeated forward showed; without an origin, it is finite."""

    origin: Origin | None
    outputs: list[tuple[str, Tensor]]


def _look_at_forward(
    kept: KeptPass, names: dict[int, str], roots: tuple[Tensor, ...], frame: FrameType | None
) -> _Looked:
    repetition = repeat_alone(kept, names, backward=False)
    if repetition is None:
        return _Looked(None, [])
    root = repetition.forward_root()
    if root is None:
        return _Looked(None, repetition.outputs)
    source = root.source
    if isinstance(source, Given) and id(source.tensor) in kept.computed:
        # The input is not data: the program computed it. Its graph is the loss's.
        found = find_loss_origin(roots, None, [])
        if found is not None:
            return _Looked(_with_line(*found, roots, kept, frame), repetition.outputs)
    return _Looked(_of_root(root, kept), repetition.outputs)


def _of_root(root: Root, kept: KeptPass) -> Origin:
    origin = origin_of(root, kept)
    return origin if kept.is_intact else replace(origin, repeated=False)


def _outputs(kept: KeptPass | None) -> list[Tensor]:
    alive = [reference() for reference in kept.outputs] if kept is not None else []
    return [tensor for tensor in alive if tensor is not None]


def _with_line(
    origin: Origin, node: GraphNode, roots: tuple[Tensor, ...], kept: KeptPass | None, frame: FrameType | None
) -> Origin:
    frame = users_frame(frame)
    if frame is None:
        return origin
    graph = graph_of(roots, kept.sequence if kept is not None else 0)
    same = [each.sequence for each in graph if each.name == node.name]
    number = same.index(node.sequence) if node.sequence in same else 0
    lines = find_call(frame, kept.called_at if kept is not None else None, node.name, number)
    return replace(origin, line=lines[0], candidates=lines[1:]) if lines else origin


def _loss_backward(kept: KeptPass, tails: LossTails, frame: FrameType | None) -> tuple[Origin, dict[str, Tensor]]:
    """Describe a non-finite gradient that came out of the loss's own code."""
    tail = tails.of_pass(kept.sequence)
    trap = next(iter(tail.traps()), None) if tail is not None else None
    gradient = next(each for each in kept.gradients.values() if badness(each))
    # On a device the loss itself has not been checked yet.
    is_loss = tail is not None and any(badness(loss) for loss in tail.losses)
    about = of_values(gradient, badness(gradient), [], kept.batch_size)
    about = replace(about, stage="loss" if is_loss else "backward")
    if trap is None:
        custom = tail.customs[0] if tail is not None and tail.customs else ""
        lines = _lines(frame, kept, tail, custom, 0)
        return replace(about, node=f"{custom}Backward" if custom else "", call=custom, line=_first(lines)), {}
    with torch.no_grad():
        values: list[dict[str, Any]] = [
            {"name": name, "shape": list(value.shape), "at": value.expand(trap.mask.shape)[trap.mask][:8].tolist()}
            for name, value in trap.saved.items()
            if isinstance(value, Tensor)
        ]
        about = replace(
            about,
            indices=first_indices(trap.mask),
            count=int(trap.mask.sum()),
            total=trap.mask.numel(),
            shape=tuple(trap.mask.shape),
            samples=samples(trap.mask, kept.batch_size),
        )
    lines = _lines(frame, kept, tail, trap.name, trap.number)
    origin = replace(
        about,
        node=trap.node,
        op=f"aten.{trap.name}",
        call=trap.name,
        line=_first(lines),
        candidates=lines[1:],
        inputs=values,
        scalars={name: value for name, value in trap.saved.items() if not isinstance(value, Tensor)},
    )
    return origin, {name: value for name, value in trap.saved.items() if isinstance(value, Tensor)}


def _lines(
    frame: FrameType | None, kept: KeptPass, tail: LossTail | None, operation: str, number: int
) -> tuple[Line, ...]:
    frame = users_frame(frame)
    if frame is None:
        return ()
    last = tail.line.number if tail is not None and tail.line is not None else frame.f_lineno
    return find_call(frame, kept.called_at, operation, number, last)


def _first(lines: tuple[Line, ...]) -> Line | None:
    return lines[0] if lines else None
