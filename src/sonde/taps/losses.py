"""See losses without the user's help: every loss function of torch, and where a backward pass starts.

The loss modules of torch and code that calls `F.cross_entropy(...)` both end in functions of `torch.nn.functional`.
Those, and the ones they call, are replaced while a session is attached; see `loss_functions`.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from sonde.facts import LIKELIHOOD, LossFacts
from sonde.hooks.guard import Guard, Handle, remove_all
from sonde.hooks.torch_state import backward_id, is_capturing
from sonde.hooks.unpack import unpack
from sonde.records import Phase
from sonde.stats.protocol import Recorder
from sonde.taps.belonging import Belonging
from sonde.taps.loss_functions import FUNCTIONS, LossCall, LossFunction
from sonde.taps.loss_graph import ModelOutput, raises_likelihood, read_loss, read_reduction
from sonde.taps.plain import MAX_ELEMENTS, is_plain, is_real, some_elements
from sonde.vitals import LOOP, LOSS, ROOT, part_of

# Losses of one step beyond this many share the last one's site.
MAX_CALLS: Final = 4
# Steps in which the number is read that a backward pass starts from.
FIRST_ROOTS: Final = 8
# Outputs of models that are kept until the backward pass.
MAX_KEPT: Final = 8
ROOTS_EVERY: Final = 7


class LossTap:
    """Reports losses, what they compare, and how they were called.

    `is_due` says whether to look in a phase; `heard` is handed every training call that was looked at, `stated` the
    facts about it, once they are known.
    """

    def __init__(
        self,
        recorder: Recorder,
        guard: Guard,
        *,
        outputs: bool,
        belonging: Belonging,
        is_due: Callable[[Phase], bool],
        heard: Callable[[LossCall], None],
        stated: Callable[[LossFacts], None],
    ) -> None:
        self.seen_in_step = False
        self._recorder = recorder
        self._outputs = outputs
        self._belonging = belonging
        self._is_due = is_due
        self._heard = heard
        self._stated = stated
        self._calls: Counter[str] = Counter()
        self._numbers: dict[tuple[str, int], int] = {}
        self._steps = 0
        self._root_site = -1
        self._function_seen = False
        self._is_written = True
        self._outputs_kept: deque[ModelOutput] = deque(maxlen=MAX_KEPT)
        self._undecided: LossFacts | None = None
        self._sites: dict[tuple[str, Phase, int, str], int] = {}
        self._guard = guard
        self._handles: list[Handle] = []

    def attach(self) -> None:
        """Begin to listen."""
        for each in FUNCTIONS:
            see = self._guard.wrap("losses", functools.partial(self._see, each))
            self._handles.append(each.function.listen(after=see))

    def remove(self) -> None:
        """Stop listening."""
        remove_all(self._handles)

    def before_backward(self, roots: tuple[Tensor, ...]) -> None:
        """Note that a backward pass begins; losses are numbered anew after it."""
        self._calls.clear()
        outputs = list(self._outputs_kept)
        self._outputs_kept.clear()
        undecided, self._undecided = self._undecided, None
        if len(roots) != 1 or not is_plain(roots[0]) or roots[0].numel() != 1:
            return
        if (self._steps < FIRST_ROOTS or self._steps % ROOTS_EVERY == 0) and self._is_due("train"):
            self._see_root(roots[0])
        if undecided is not None:
            reduction = read_reduction(roots[0]) or "none"
            self._stated(replace(undecided, settings=undecided.settings | {"reduction": reduction}))
        self._is_written = not self._function_seen
        if not self.seen_in_step:
            self.seen_in_step = True
            if self._is_due("train"):
                self._see_written(roots[0], outputs)

    def keep_output(self, output: Any) -> None:
        """Take what a model returned in a training pass, for a loss that calls no function of torch."""
        if not self._is_written or self.seen_in_step:
            return
        for _, tensor in unpack(output):
            kept = ModelOutput.of(tensor) if is_real(tensor) and tensor.numel() <= MAX_ELEMENTS else None
            if kept is not None:
                self._outputs_kept.append(kept)

    def _see_written(self, root: Tensor, outputs: list[ModelOutput]) -> None:
        loss = read_loss(root, outputs)
        if loss is not None:
            number = self._number(loss.kind, 0)
            call = LossCall(loss.kind, loss.values, loss.target, root, number, loss.settings, loss.shapes)
            self._record(call, "train")
            return
        if raises_likelihood(root):
            self._stated(LossFacts(kind=LIKELIHOOD, settings={"by_hand": True}))
        if self._outputs:
            self._report("output", "train", self._number("backward", 0), "", "backward", root)

    def _see_root(self, root: Tensor) -> None:
        if self._root_site < 0:
            self._root_site = self._recorder.site(LOOP, "vital", part=part_of(ROOT), tensor=root)
        self._recorder.see(self._root_site, root.detach())

    def end_step(self) -> None:
        """Begin to look for losses anew."""
        self._steps += 1
        self.seen_in_step = self._function_seen = False
        self._calls.clear()
        self._outputs_kept.clear()

    def _see(self, function: LossFunction, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # What cannot be differentiated where gradients are enabled is a metric, not what is trained on.
        phase: Phase = "train" if torch.is_grad_enabled() else "eval"
        if backward_id() != -1 or not is_plain(output) or (phase == "train" and not output.requires_grad):
            return
        if is_capturing() or not self._is_ours(phase, output):
            return
        kind = function.kind
        call = function.read(args, kwargs, output, self._number(kind, self._calls[kind]))
        if call is None:
            return
        if phase == "train":
            self._calls[kind] += 1
            self.seen_in_step = self._function_seen = True
        if self._is_due(phase):
            self._record(call, phase)

    def _is_ours(self, phase: Phase, output: Tensor) -> bool:
        return self._belonging.owns(output) if phase == "train" else self._belonging.owns_evaluation()

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
            self._state(call)
            self._heard(call)

    def _state(self, call: LossCall) -> None:
        # How its elements become one number shows when that number is differentiated.
        if call.settings.get("reduction") == "none":
            self._undecided = call.facts()
        else:
            self._stated(call.facts())

    def _report(self, quantity: Any, phase: Phase, call: int, part: str, kind: str, tensor: Tensor) -> None:
        key = (quantity, phase, call, part)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self._recorder.site(
                LOSS, quantity, phase=phase, call=call, part=part, kind=kind, tensor=tensor
            )
        self._recorder.see(site, tensor.detach())
