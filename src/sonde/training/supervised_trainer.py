"""A trainer for models that learn from labels. It can be used as it is."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sonde.training.base_trainer import BaseTrainer
from sonde.training.datapoints import Datapoint
from sonde.training.metrics import LossPerSample


class SupervisedTrainer(BaseTrainer):
    """Trains `model(inputs)` on `criterion(outputs, labels)`.

    Without a `metric`, validation gives the loss of every sample.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = (*BaseTrainer.REQUIRED, "criterion")

    def _init_metric(self) -> None:
        super()._init_metric()
        if self.metric is None:
            self.metric = LossPerSample(self.criterion)

    def _compute_loss(self, dp: Datapoint) -> Tensor:
        dp["outputs"] = self._forward(dp)
        loss: Tensor = self.criterion(dp["outputs"], dp["labels"])
        return loss
