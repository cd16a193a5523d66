"""Sensors for what optimizers are given."""

from __future__ import annotations

from torch import Tensor

from sonde.core.signals import CLIP_MAX, CLIP_NORM, SCALED_CLIP
from sonde.record.kinds import is_still_scaled
from sonde.sensors.sensor import Clip, Sensor


class Clipping(Sensor):
    """The norm before clipping, as `clip_grad_norm_` measured it, and the largest allowed one.

    They are written under the optimizer of the first parameter clipped.
    """

    produces = (CLIP_NORM, CLIP_MAX, SCALED_CLIP)
    cost = "no pass over the gradients: torch has measured the norm already"

    def on_clip(self, clip: Clip) -> None:
        """Note the norm."""
        owners, watched = self.context.owners, self.context.watched
        owner = next((owners[id(each)] for each in clip.parameters if id(each) in owners), None)
        if owner is None or not watched.is_due("train"):
            return
        name, key = owner
        if isinstance(clip.norm, Tensor):
            self.signals.see(name, CLIP_NORM, clip.norm.detach())
        if isinstance(clip.max_norm, int | float):
            self.signals.put(name, CLIP_MAX, clip.max_norm)
        scaler = watched.scaler()
        if scaler is not None:
            self.signals.put(name, SCALED_CLIP, is_still_scaled(scaler, key))
