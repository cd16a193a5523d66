"""Record the training of a `pytorch_lightning.Trainer`; as `sonde.integrations.lightning`, for the other package."""

from __future__ import annotations

from sonde.errors import MissingExtra
from sonde.integrations.lightning_hooks import LightningHooks

try:
    from pytorch_lightning import Callback
except ImportError as error:
    raise MissingExtra("pytorch_lightning", "lightning", "sonde.integrations.pytorch_lightning") from error


class SondeCallback(LightningHooks, Callback):  # type: ignore[misc] # its package is not needed for checking types
    """Records what a Trainer of this package trains; see `LightningHooks` for its arguments."""
