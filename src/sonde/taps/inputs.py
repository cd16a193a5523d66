"""What the model is called with: the statistics of every input, and of the features of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from sonde.hooks.unpack import unpack
from sonde.records import Phase
from sonde.taps.plain import MAX_ELEMENTS, is_plain, is_real, is_whole
from sonde.taps.row_marks import RowMarks
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import COLUMN_OFFSET, COLUMN_SCALE

FIRST_LOOKS: Final = 3
LOOK_EVERY: Final = 50
MAX_CALLS: Final = 4


class ModelInputs:
    """Reports the tensors that a watched model is called with, as `(model):input[0]` and the like.

    `first_input` is handed the first input of real numbers of each training pass, `first_tokens` the first of whole
    numbers.
    """

    def __init__(
        self,
        sites: VitalSites,
        first_input: Callable[[Tensor], None],
        first_tokens: Callable[[Tensor], None] = lambda tokens: None,
    ) -> None:
        self._recorder = sites.recorder
        self._sites = sites
        self._first_input = first_input
        self._first_tokens = first_tokens
        self._numbers: dict[tuple[str, Phase, int, str], int] = {}
        self._looks: dict[str, int] = {}
        self._rows = RowMarks(sites)

    def see(self, model: str, phase: Phase, call: int, inputs: tuple[Any, ...] | Mapping[str, Any]) -> None:
        """Take the positional or the named arguments of a pass."""
        call = min(call, MAX_CALLS - 1)
        given = [(part, tensor) for part, tensor in unpack(inputs) if is_plain(tensor)]
        for part, tensor in given:
            self._recorder.see(self._site(model, phase, call, part, tensor), tensor.detach())
        if given and (phase == "eval" or not call):
            self._rows.see(model, phase, given[0][1])
        if phase != "train" or call:
            return
        first = next((tensor.detach() for _, tensor in given if is_real(tensor)), None)
        if first is not None:
            self._see_columns(model, first)
            self._first_input(first)
        tokens = next((tensor for _, tensor in given if is_whole(tensor)), None)
        if tokens is not None:
            self._first_tokens(tokens)

    @torch.no_grad()
    def _see_columns(self, model: str, values: Tensor) -> None:
        if values.dim() != 2 or len(values) < 2 or values.numel() > MAX_ELEMENTS:
            return
        look = self._looks.get(model, 0)
        self._looks[model] = look + 1
        if look < FIRST_LOOKS or look % LOOK_EVERY == 0:
            wide = values.float()
            self._sites.see(model, COLUMN_SCALE, wide.std(0))
            self._sites.see(model, COLUMN_OFFSET, wide.mean(0))

    def _site(self, model: str, phase: Phase, call: int, part: str, tensor: Tensor) -> int:
        key = (model, phase, call, part)
        site = self._numbers.get(key)
        if site is None:
            site = self._numbers[key] = self._recorder.site(
                model, "input", phase=phase, call=call, part=part, tensor=tensor
            )
        return site
