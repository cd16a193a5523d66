"""Record the training of a Lightning `Trainer`.

trainer = lightning.Trainer(max_epochs=3, callbacks=[SondeCallback(run="runs/lit")])
"""

from __future__ import annotations

from sonde.errors import MissingExtra
from sonde.integrations.lightning_hooks import LightningHooks

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise MissingExtra("lightning", "lightning", "sonde.integrations.lightning") from error


class SondeCallback(LightningHooks, Callback):  # type: ignore[misc] # its package is not needed for checking types
    """Records what a Trainer of this package trains; see `LightningHooks` for its arguments."""
