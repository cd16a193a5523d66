"""What is looked at once, or only in the first steps: softmaxes, parameters out of sight, padding; and the last step.

Each says something exact about how the program is wired, so a few looks are enough.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import Parameter

from sonde.hooks.autograd_graph import next_sequence
from sonde.taps.carried_states import CarriedStates
from sonde.taps.facts import FactBook
from sonde.taps.graph_marks import reaches_others, read_bootstrap, read_columns, read_reshapes
from sonde.taps.hidden import HiddenParameters
from sonde.taps.look_ahead import LookAhead
from sonde.taps.loss_functions import LossCall
from sonde.taps.loss_softmax import read_softmaxes
from sonde.taps.padding import Padding
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import LOOP, WRITTEN

JUDGE_HIDDEN_AT: Final = 3
"""The step after which parameters out of sight are judged."""


class FirstLooks:
    """Holds the parts; the vital signs tell it what happens."""

    def __init__(self, sites: VitalSites) -> None:
        self._sites = sites
        self._padding = Padding(sites)
        self._ahead = LookAhead(sites)
        self._book: FactBook | None = None
        self._hidden: HiddenParameters | None = None
        self._versions: list[tuple[Parameter, int]] = []
        self._starts: list[int] = []
        self._spans: list[tuple[int, str]] = []
        self._states = CarriedStates()
        self._has_softmaxes = False
        self._steps = 0
        self._process = os.getpid()

    def prepare(self, book: FactBook, models: Mapping[str, nn.Module], parameters: list[Parameter]) -> None:
        """Look at the models before the first step."""
        self._book = book
        known = {id(each) for model in models.values() for each in model.parameters()}
        hidden = HiddenParameters(models, known)
        self._hidden = hidden if hidden else None
        self._versions = [(each, each._version) for each in parameters]

    def clear(self) -> None:
        """Forget the models and what was seen."""
        self._book = self._hidden = None
        self._padding = Padding(self._sites)
        self._ahead = LookAhead(self._sites)
        self._states = CarriedStates()
        self._versions, self._starts, self._spans = [], [], []

    # ------------------------------------------------------------------ passes

    def enter(self) -> None:
        """Note that a leaf module begins."""
        if not self._has_softmaxes:
            del self._starts[len(self._spans) :]  # one that raised has not left
            self._starts.append(next_sequence())

    def leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note which autograd nodes a leaf module has made, and whose state a recurrent one was given."""
        if self._states.see(name, module, args, output, self._steps) and self._book is not None:
            self._book.add_carried(name)
        if not self._has_softmaxes and len(self._starts) > len(self._spans):
            self._spans.append((next_sequence(), name))

    def see_tokens(self, tokens: Tensor) -> None:
        """Take the whole numbers that a training pass begins with."""
        self._padding.see_tokens(tokens)
        self._ahead.see_tokens(tokens)

    def see_loss(self, call: LossCall) -> None:
        """Take a training call of a loss."""
        self._padding.see_loss(call)
        self._ahead.see_loss(call)

    def before_backward(self, roots: tuple[Tensor, ...]) -> None:
        """Read the graph of the first backward pass."""
        if self._has_softmaxes or self._book is None or len(roots) != 1:
            return
        self._has_softmaxes = True
        root = roots[0]
        self._book.add_softmaxes(read_softmaxes(root, self._module_of))
        self._ahead.before_backward(root)
        if reaches_others(root):
            self._book.add_input_gradient()
        self._book.add_marks(read_reshapes(root, self._module_of), read_columns(root), read_bootstrap(root))
        self._starts, self._spans = [], []

    def _module_of(self, sequence: int) -> str:
        """Return the leaf module that made an autograd node, else the module around those before and after it."""
        at = bisect_right(self._starts, sequence) - 1
        if 0 <= at < len(self._spans) and sequence < self._spans[at][0]:
            return self._spans[at][1]
        around = [self._spans[index][1].split(".")[:-1] for index in (at, at + 1) if 0 <= index < len(self._spans)]
        same = takewhile(lambda parts: len(set(parts)) == 1, zip(*around, strict=False))
        return ".".join(parts[0] for parts in same)

    # ------------------------------------------------------------------ steps

    def end_step(self) -> None:
        """Count a step, and judge what needed some."""
        self._steps += 1
        self._versions = []
        if self._steps == JUDGE_HIDDEN_AT and self._hidden is not None and self._book is not None:
            self._book.add_hidden(self._hidden.judge())
            self._hidden = None

    def has_never_stepped(self) -> bool:
        """Say whether the run ends without a step, in the process that began it."""
        return self._steps == 0 and os.getpid() == self._process

    def write_written(self) -> None:
        """Say how many parameters were written to though nobody who is watched has stepped."""
        written = sum(parameter._version != version for parameter, version in self._versions)
        self._sites.put(LOOP, WRITTEN, written)
