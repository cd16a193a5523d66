"""Find losses without the user's help: every loss function of torch, and where a backward pass starts.

The loss modules of torch and code that calls `F.cross_entropy(...)` both end in functions of `torch.nn.functional`.
Those, and the ones they call, are replaced while a session is attached; see `loss_functions`.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from sonde.core.facts import LIKELIHOOD, LossFacts
from sonde.core.signals import LOSS
from sonde.hooks.guard import Guard, Handle, backward_id, is_capturing, remove_all
from sonde.hooks.unpack import unpack
from sonde.records import Phase
from sonde.sensors.loss_functions import FUNCTIONS, LossCall, LossFunction
from sonde.sensors.loss_graph import ModelOutput, raises_likelihood, read_loss, read_reduction
from sonde.sensors.tensors import MAX_ELEMENTS, is_plain, is_real, some_elements
from sonde.stats.protocol import Recorder

# Losses of one step beyond this many share the last one's site.
MAX_CALLS: Final = 4
# Outputs of models that are kept until the backward pass.
MAX_KEPT: Final = 8
# The way from a loss to the nearest parameter is short; beyond this many nodes nothing is concluded.
MAX_FOLLOWED: Final = 1024
_ACCUMULATE: Final = "AccumulateGrad"

_numbers = itertools.count(1)


class Belonging:
    """Decides which losses belong to these models, where several models are trained in one process.

    Loss functions and backward passes are seen wherever they are called. A session takes those that its own models have
    part in: the graph of a loss leads to their parameters, or to those of others only. Where it leads to no parameter
    at all, or is too large to be followed, a pass of the session's own models in this step decides.
    """

    _last_to_evaluate: ClassVar = 0
    """The session whose models ran last without gradients: there is no graph then to decide by."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._number = next(_numbers)
        self._own: set[int] | None = None
        self._is_telling = False
        """Whether parameters found in a graph would be the models' own: those that are sharded are put together."""
        self._has_passed = False

    def saw_pass(self, phase: Phase) -> None:
        """Note that one of the models begins to run."""
        if phase == "eval":
            Belonging._last_to_evaluate = self._number
        else:
            self._has_passed = True

    def end_step(self) -> None:
        """Forget the passes of a step."""
        self._has_passed = False

    def forget(self) -> None:
        """Release the models."""
        self._models, self._own = [], None

    def owns_evaluation(self) -> bool:
        """Return whether no other session's model was evaluated since one of these was."""
        return Belonging._last_to_evaluate in (0, self._number)

    def owns(self, loss: Any) -> bool:
        """Return whether a loss with a graph belongs to the models."""
        node = getattr(loss, "grad_fn", None)
        if node is None:
            return self._has_passed
        own = self._parameters() if self._own is None else self._own
        found = self._reaches(node, own)
        if found is False and own != (own := self._parameters()):  # they were replaced meanwhile
            found = self._reaches(node, own)
        return self._has_passed if found is None else found

    def _parameters(self) -> set[int]:
        trained = [each for model in self._models for each in model.parameters() if each.requires_grad]
        self._own = {id(each) for each in trained}
        self._is_telling = bool(trained) and all(map(is_plain, trained))
        return self._own

    def _reaches(self, loss: Any, own: set[int]) -> bool | None:
        """Return whether a graph leads to a parameter of the models; None if that is unknown."""
        waiting, seen = deque([loss]), {loss}
        of_others = False
        while waiting:
            for node, _ in waiting.popleft().next_functions:
                if node is None or node in seen:
                    continue
                seen.add(node)
                if type(node).__name__ != _ACCUMULATE:
                    waiting.append(node)
                elif id(node.variable) in own:
                    return True
                else:
                    of_others |= isinstance(node.variable, nn.Parameter)
            if len(seen) > MAX_FOLLOWED:
                return None
        return False if of_others and self._is_telling else None


class LossCalls:
    """Records losses and what they compare, and reports how they were called.

    `is_due` returns whether to look in a phase, `is_skipped` whether a training step is left alone; `on_loss` takes
    every training call that was looked at, `on_facts` the facts about it, once they are known.
    """

    def __init__(
        self,
        recorder: Recorder,
        guard: Guard,
        *,
        outputs: bool,
        belonging: Belonging,
        is_due: Callable[[Phase], bool],
        is_skipped: Callable[[], bool],
        on_loss: Callable[[LossCall], None],
        on_facts: Callable[[LossFacts], None],
    ) -> None:
        self.seen_in_step = False
        self._recorder = recorder
        self._outputs = outputs
        self._belonging = belonging
        self._is_due = is_due
        self._is_skipped = is_skipped
        self._on_loss = on_loss
        self._on_facts = on_facts
        self._calls: Counter[str] = Counter()
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._turn = 0
        """How many optimizers have stepped in this step."""
        self._function_seen = False
        self._is_written = True
        self._outputs_kept: deque[ModelOutput] = deque(maxlen=MAX_KEPT)
        self._undecided: LossFacts | None = None
        self._sites: dict[tuple[str, Phase, int, str], int] = {}
        self._guard = guard
        self._handles: list[Handle] = []

    def attach(self) -> None:
        """Start listening."""
        for each in FUNCTIONS:
            see = self._guard.wrap("losses", functools.partial(self._see, each))
            self._handles.append(each.function.listen(after=see, during="awake"))

    def remove(self) -> None:
        """Stop listening."""
        remove_all(self._handles)

    def before_backward(self, roots: tuple[Tensor, ...]) -> None:
        """Handle the beginning of a backward pass; losses are numbered anew after it."""
        self._calls.clear()
        outputs = list(self._outputs_kept)
        self._outputs_kept.clear()
        undecided, self._undecided = self._undecided, None
        if len(roots) != 1 or not is_plain(roots[0]) or roots[0].numel() != 1:
            return
        if undecided is not None:
            reduction = read_reduction(roots[0]) or "none"
            self._on_facts(replace(undecided, settings=undecided.settings | {"reduction": reduction}))
        self._is_written = not self._function_seen
        if not self.seen_in_step:
            self.seen_in_step = True
            if self._is_due("train"):
                self._see_written(roots[0], outputs)

    def keep_output(self, output: Any) -> None:
        """Remember the output of a model in a training pass, for a loss that calls no function of torch."""
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
            self._on_facts(LossFacts(kind=LIKELIHOOD, settings={"by_hand": True}))
        if self._outputs:
            self._report("output", "train", self._number("backward", 0), "", "backward", root)

    def continue_step(self) -> None:
        """Continue to count losses in this step: further ones are for another optimizer."""
        self._turn += 1
        self.seen_in_step = self._function_seen = False
        self._calls.clear()

    def end_step(self) -> None:
        """Begin to look for losses anew."""
        self._turn = 0
        self.seen_in_step = self._function_seen = False
        self._calls.clear()
        self._outputs_kept.clear()

    def _see(self, function: LossFunction, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # What cannot be differentiated where gradients are enabled is a metric, not what is trained on.
        phase: Phase = "train" if torch.is_grad_enabled() else "eval"
        if phase == "train" and self._is_skipped():
            return
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
        """Return a number by which losses of two kinds, or for two optimizers, do not share a site."""
        key = (kind, place, self._turn)
        return min(self._numbers.setdefault(key, len(self._numbers)), MAX_CALLS - 1)

    def _record(self, call: LossCall, phase: Phase) -> None:
        number = call.number if phase == "train" else self._number(call.kind, 0)
        if self._outputs:
            self._report("output", phase, number, "", call.kind, call.output)
        self._report("input", phase, number, ".input", call.kind, some_elements(call.values))
        if call.target is not None and is_plain(call.target):
            self._report("input", phase, number, ".target", call.kind, some_elements(call.target))
        if phase == "train":
            self._state(call)
            self._on_loss(call)

    def _state(self, call: LossCall) -> None:
        # How its elements become one number shows when that number is differentiated.
        if call.settings.get("reduction") == "none":
            self._undecided = call.facts()
        else:
            self._on_facts(call.facts())

    def _report(self, quantity: Any, phase: Phase, call: int, part: str, kind: str, tensor: Tensor) -> None:
        key = (quantity, phase, call, part)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self._recorder.site(
                LOSS, quantity, phase=phase, call=call, part=part, kind=kind, tensor=tensor
            )
        self._recorder.see(site, tensor.detach())
