"""The origin of something non-finite, as plain data: which operation, where, with which values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor

from sonde.core import files
from sonde.forensics.keeper import KeptPass
from sonde.forensics.trace import Given, Root
from sonde.forensics.values import INF, NAN, describe, first_indices, offending, samples
from sonde.hooks.user_line import Line

Stage = Literal["data", "weights", "forward", "loss", "backward", "optimizer"]

_SIGNS: Final = {
    "truediv": "/", "true_divide": "/", "rtruediv": "/", "div": "/", "add": "+", "sub": "-", "rsub": "-", "mul": "*",
    "matmul": "@", "rmatmul": "@", "pow": "**", "rpow": "**", "itruediv": "/=", "imul": "*=", "iadd": "+=",
    "isub": "-=", "neg": "-", "getitem": "[]", "setitem": "[]=",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where something non-finite began."""

    stage: Stage
    op: str = ""
    """The operation as torch's dispatcher knows it: `aten.log.default`."""
    call: str = ""
    """What the program called: `log`, `softmax`, `/`."""
    module: str = ""
    tensor: str = ""
    """The parameter, buffer or input that was not finite, where it is one."""
    node: str = ""
    """In a backward pass: the autograd node, `SqrtBackward0`."""
    line: Line | None = None
    after: Line | None = None
    """The last line whose result is known to be finite, where the operation itself could not be determined."""
    before: Line | None = None
    """The line at which something non-finite was seen after that."""
    candidates: tuple[Line, ...] = ()
    """Further lines that it may have been, where the program leaves more than one."""
    makes: Literal["nan", "inf"] = "nan"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    count: int = 0
    """How many elements are not finite."""
    total: int = 0
    indices: list[list[int]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    batch_size: int | None = None
    inputs: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)
    symptom: str = ""
    """The operation that later made NaN of the infinity."""
    repeated: bool = True
    """Whether repeating the step showed it; False if it follows from the readings alone."""

    @property
    def name(self) -> str:
        """The operation without namespace and overload: `log`."""
        return self.op.split(".")[1] if self.op.count(".") else self.op

    @property
    def function(self) -> str:
        """The operation in the program's words."""
        plain = self.call.strip("_") if self.call.startswith("__") else self.call
        return _SIGNS.get(plain, plain) or self.name

    def same_place(self, other: Origin) -> bool:
        """Return whether both name the same operation in the same stage, module and line."""
        return (self.stage, self.op, self.module, self.node) == (other.stage, other.op, other.module, other.node) and (
            self.line is None or other.line is None or self.line.number == other.line.number
        )

    def to_json(self) -> dict[str, Any]:
        """Return the origin as JSON-ready values, without what is empty."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain["line"] = None if self.line is None else _line_to_json(self.line)
        for name in ("after", "before"):
            plain[name] = None if plain[name] is None else _line_to_json(plain[name])
        plain["candidates"] = [_line_to_json(line) for line in self.candidates]
        plain["shape"] = list(self.shape)
        return {name: value for name, value in plain.items() if value not in ("", None, [], {})}

    @classmethod
    def from_json(cls, plain: dict[str, Any], where: str = "What was given") -> Self:
        """Return the origin that `to_json` described, ignoring what is not known.

        Raises:
            RunDamaged: It does not describe an origin; the message names `where` and the field.

        """
        known = dict(plain)
        for name in ("line", "after", "before"):
            if isinstance(known.get(name), dict):
                known[name] = _line_from_json(known[name])
        if isinstance(known.get("candidates"), list):
            known["candidates"] = [_line_from_json(line) for line in known["candidates"]]
        return files.convert(known, cls, where, "an origin")


@dataclass(frozen=True, slots=True, eq=False)
class Incident:
    """Something non-finite: where it began, the pass it happened in, and what is needed to tell it again."""

    origin: Origin
    kept: KeptPass | None = None
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)
    """What the model returned when the pass was repeated."""
    operands: dict[str, Tensor] = field(default_factory=dict)
    """What an operation of the loss's own code was given; that code cannot be called again."""


def origin_of(root: Root, kept: KeptPass) -> Origin:
    """Describe where a repeated pass went wrong."""
    source = root.source
    if isinstance(source, Given):
        return _given(source, kept)
    return replace(
        of_values(source.output, source.badness, source.inputs, kept.batch_size),
        stage=source.stage,
        op=source.op,
        call=source.call.name if source.call else "",
        module=source.module,
        node=source.node,
        line=source.line or kept.called_at,
        scalars=source.scalars,
        symptom=root.symptom.op if root.symptom else "",
    )


def of_values(output: Tensor | None, bad: int, inputs: list[tuple[str, Tensor]], batch_size: int | None) -> Origin:
    """Describe the result of an operation and what it was made of."""
    if output is None:
        return Origin(stage="forward", makes="nan" if bad & NAN else "inf", batch_size=batch_size)
    with torch.no_grad():
        kind = NAN if bad & NAN else INF
        mask = offending(output, kind)
        return Origin(
            stage="forward",
            makes="nan" if kind == NAN else "inf",
            shape=tuple(output.shape),
            dtype=str(output.dtype).removeprefix("torch."),
            count=int(mask.sum()),
            total=output.numel(),
            indices=first_indices(mask),
            samples=samples(mask, batch_size),
            batch_size=batch_size,
            inputs=[describe(name, tensor, mask) for name, tensor in inputs],
        )


def _given(source: Given, kept: KeptPass) -> Origin:
    about = of_values(source.tensor, source.badness, [], kept.batch_size)
    stage: Stage = "weights" if source.role in ("parameter", "buffer") else "data"
    module = source.name.rpartition(".")[0] or "(model)" if stage == "weights" else ""
    return replace(
        about,
        stage=stage,
        module=module,
        tensor=source.name,
        line=kept.called_at,
        samples=about.samples if stage == "data" else [],
    )


def _line_to_json(line: Line) -> dict[str, Any]:
    return {"file": line.file, "line": line.number, "function": line.function, "text": line.text}


def _line_from_json(plain: Any) -> Any:
    return {**plain, "number": plain.get("line")} if isinstance(plain, dict) else plain
