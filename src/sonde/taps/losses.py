"""See losses without the user's help: every loss function of torch, and where a backward pass starts.

The loss modules of torch and code that calls `F.cross_entropy(...)` both end in functions of `torch.nn.functional`.
Those are replaced while a session is attached.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as functional
from torch import Tensor

from sonde.facts import LossFacts, Plain
from sonde.records import Phase
from sonde.signals import Recorder, is_capturing
from sonde.taps.guard import Guard
from sonde.taps.patches import Heard, Patch
from sonde.taps.plain import is_plain, some_elements
from sonde.vitals import LOOP, LOSS, ROOT, part_of

NAMES: Final = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)
PATCHES: Final = {name: Patch(functional, name) for name in NAMES}
# Losses of one step beyond this many share the last one's site.
MAX_CALLS: Final = 4
# Steps in which the number is read that a backward pass starts from.
FIRST_ROOTS: Final = 8
ROOTS_EVERY: Final = 7
# How torch calls what a loss compares, by the order in which to look.
_INPUTS: Final = ("input", "input1", "anchor", "log_probs")
_TARGETS: Final = ("target", "targets")
_in_backward = torch._C._current_graph_task_id


@dataclass(frozen=True, slots=True, eq=False)
class LossCall:
    """One call of a loss function."""

    kind: str
    values: Tensor
    target: Tensor | None
    output: Tensor
    number: int
    """Which loss it is: those of another kind, or that follow each other before a backward pass, have other ones."""
    settings: dict[str, Plain] = field(default_factory=dict)

    @property
    def class_dim(self) -> int | None:
        """The dimension that stands for classes; None if there is only one number per sample."""
        if self.values.dim() < 2:
            return None
        return 1 if self.kind in ("cross_entropy", "nll_loss", "multi_margin_loss") else self.values.dim() - 1

    @property
    def classes(self) -> int | None:
        """How many classes there are to choose from, where the loss chooses one."""
        if self.kind not in ("cross_entropy", "nll_loss", "multi_margin_loss"):
            return None
        return int(self.values.shape[1 if self.values.dim() > 1 else 0])

    def facts(self) -> LossFacts:
        """Return what the call says about the loss."""
        target = self.target
        return LossFacts(
            kind=self.kind,
            settings=self.settings,
            input_shape=tuple(self.values.shape),
            target_shape=tuple(target.shape) if target is not None else (),
            target_dtype=str(target.dtype).removeprefix("torch.") if target is not None else "",
            classes=self.classes,
        )


class LossTap:
    """Reports losses, what they compare, and how they were called.

    `is_due` says whether to look in a phase; `heard` is handed every training call that was looked at.
    """

    def __init__(
        self,
        recorder: Recorder,
        guard: Guard,
        *,
        outputs: bool,
        is_due: Callable[[Phase], bool],
        heard: Callable[[LossCall], None],
    ) -> None:
        self.seen_in_step = False
        self._recorder = recorder
        self._outputs = outputs
        self._is_due = is_due
        self._heard = heard
        self._calls: Counter[str] = Counter()
        self._numbers: dict[tuple[str, int], int] = {}
        self._steps = 0
        self._root_site = -1
        self._sites: dict[tuple[str, Phase, int, str], int] = {}
        see = guard.wrap("losses", self._see)
        self._listeners: dict[str, Heard] = {name: functools.partial(see, name) for name in NAMES}
        self._readers = {name: _reader(getattr(functional, name)) for name in NAMES if PATCHES[name].is_there}

    def attach(self) -> None:
        """Begin to listen."""
        for name in self._readers:
            PATCHES[name].add(self._listeners[name])

    def remove(self) -> None:
        """Stop listening."""
        for name, listener in self._listeners.items():
            PATCHES[name].remove(listener)

    def before_backward(self, roots: tuple[Tensor, ...]) -> None:
        """Note that a backward pass begins; losses are numbered anew after it."""
        self._calls.clear()
        if len(roots) != 1 or not is_plain(roots[0]) or roots[0].numel() != 1:
            return
        if (self._steps < FIRST_ROOTS or self._steps % ROOTS_EVERY == 0) and self._is_due("train"):
            self._see_root(roots[0])
        if not self.seen_in_step:
            self.seen_in_step = True
            if self._outputs and self._is_due("train"):
                self._report("output", "train", 0, "", "backward", roots[0])

    def _see_root(self, root: Tensor) -> None:
        if self._root_site < 0:
            self._root_site = self._recorder.site(LOOP, "vital", part=part_of(ROOT), tensor=root)
        self._recorder.see(self._root_site, root.detach())

    def end_step(self) -> None:
        """Begin to look for losses anew."""
        self._steps += 1
        self.seen_in_step = False
        self._calls.clear()

    def _see(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # What cannot be differentiated where gradients are enabled is a metric, not what is trained on.
        phase: Phase = "train" if torch.is_grad_enabled() else "eval"
        if _in_backward() != -1 or not is_plain(output) or (phase == "train" and not output.requires_grad):
            return
        if is_capturing():
            return
        call = self._readers[kind](kind, args, kwargs, output, self._number(kind, self._calls[kind]))
        if call is None:
            return
        if phase == "train":
            self._calls[kind] += 1
            self.seen_in_step = True
        if self._is_due(phase):
            self._record(call, phase)

    def _number(self, kind: str, place: int) -> int:
        """Return a number by which losses of two kinds, taken in turns, do not share a site."""
        return min(self._numbers.setdefault((kind, place), len(self._numbers)), MAX_CALLS - 1)

    def _record(self, call: LossCall, phase: Phase) -> None:
        number = call.number if phase == "train" else self._number(call.kind, 0)
        if self._outputs:
            self._report("output", phase, number, "", call.kind, call.output)
        self._report("input", phase, number, ".input", call.kind, some_elements(call.values))
        if call.target is not None and is_plain(call.target):
            self._report("input", phase, number, ".target", call.kind, some_elements(call.target))
        if phase == "train":
            self._heard(call)

    def _report(self, quantity: Any, phase: Phase, call: int, part: str, kind: str, tensor: Tensor) -> None:
        key = (quantity, phase, call, part)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self._recorder.site(
                LOSS, quantity, phase=phase, call=call, part=part, kind=kind, tensor=tensor
            )
        self._recorder.see(site, tensor.detach())


def _reader(function: Callable[..., Any]) -> Callable[..., LossCall | None]:
    """Return what makes a LossCall of the arguments of a loss function."""
    parameters = inspect.signature(function).parameters
    names = tuple(parameters)
    defaults = {name: each.default for name, each in parameters.items() if each.default is not inspect.Parameter.empty}
    plain = {name: value for name, value in defaults.items() if isinstance(value, Plain)}

    def read(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, number: int) -> LossCall | None:
        given = dict(zip(names, args, strict=False)) | kwargs
        values = next((given[name] for name in _INPUTS if name in given), None)
        target = next((given[name] for name in _TARGETS if name in given), None)
        if not isinstance(values, Tensor) or not is_plain(values):
            return None
        settings = {name: given.get(name, value) for name, value in plain.items()}
        settings = {name: value for name, value in settings.items() if isinstance(value, Plain)}
        settings["weighted"] = isinstance(given.get("weight"), Tensor)
        return LossCall(kind, values, target if isinstance(target, Tensor) else None, output, number, settings)

    return read
