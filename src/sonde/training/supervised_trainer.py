"""A trainer for models that learn from labels."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sonde.errors import OptionError
from sonde.training.base_trainer import BaseTrainer
from sonde.training.datapoints import Datapoint
from sonde.training.scores import LossPerSample


class SupervisedTrainer(BaseTrainer):
    """Trains `model(inputs)` on `criterion(outputs, labels)`.

    Without a `metric`, validation scores the loss of every sample.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = (*BaseTrainer.REQUIRED, "criterion")

    def _init_metric(self) -> None:
        super()._init_metric()
        if self.metric is None:
            self.metric = LossPerSample(self.criterion)

    def _compute_loss(self, dp: Datapoint) -> Tensor:
        dp["outputs"] = self._forward(dp)
        try:
            loss: Tensor = self.criterion(dp["outputs"], dp["labels"])
        except (AttributeError, TypeError) as error:
            if dp.get("labels") is not None:
                raise
            raise OptionError(
                "The training loader returned a batch without labels, which the criterion needs. Return "
                "(inputs, labels) or {'inputs': ..., 'labels': ...}, or override _compute_loss."
            ) from error
        return loss
