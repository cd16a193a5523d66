"""See gradient clipping: `clip_grad_norm_` has measured the norm already, so it only needs to be noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import Tensor
from torch.nn.utils import clip_grad

from sonde.hooks.guard import Guard, Handle, remove_all
from sonde.hooks.replace_function import OverridableFunction
from sonde.hooks.torch_state import is_capturing
from sonde.record.kinds import is_still_scaled
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import CLIP_MAX, CLIP_NORM, SCALED_CLIP

# What `clip_grad_norm_` calls once it knows the norm. Where a version of torch lacks it, clipping is not seen.
FUNCTION: Final = OverridableFunction(clip_grad, "_clip_grads_with_norm_")
_NAMES: Final = ("parameters", "max_norm", "total_norm")


class ClippingTap:
    """Reports the norm before clipping and the largest allowed one, under the optimizer whose gradients they are.

    `owner_of` names the optimizer of a parameter and returns it; `clipped` is told whose gradients were written to.
    """

    def __init__(
        self,
        sites: VitalSites,
        guard: Guard,
        *,
        scaler: Any,
        owner_of: Callable[[Tensor], tuple[str, Any] | None],
        is_due: Callable[[], bool],
        clipped: Callable[[Iterable[Tensor]], None],
    ) -> None:
        self._sites = sites
        self._scaler = scaler
        self._owner_of = owner_of
        self._is_due = is_due
        self._clipped = clipped
        self._handles: list[Handle] = []
        self._listener = guard.wrap("gradient clipping", self._see)

    def attach(self) -> None:
        """Begin to listen."""
        if FUNCTION.exists:
            self._handles.append(FUNCTION.listen(after=self._listener))

    def remove(self) -> None:
        """Stop listening."""
        remove_all(self._handles)

    def _see(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        parameters, norm = given.get("parameters"), given.get("total_norm")
        parameters = [parameters] if isinstance(parameters, Tensor) else parameters
        # A generator has been used up by the call itself.
        if not isinstance(parameters, list | tuple) or is_capturing():
            return
        self._clipped(parameters)
        owner = next((owner for each in parameters if (owner := self._owner_of(each)) is not None), None)
        if owner is None or not self._is_due():
            return
        name, optimizer = owner
        if isinstance(norm, Tensor):
            self._sites.see(name, CLIP_NORM, norm.detach())
        largest = given.get("max_norm")
        if isinstance(largest, int | float):
            self._sites.put(name, CLIP_MAX, largest)
        if self._scaler is not None:
            self._sites.put(name, SCALED_CLIP, is_still_scaled(self._scaler, optimizer))
