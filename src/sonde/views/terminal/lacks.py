"""Describe in words what a run lacked for a rule to judge it."""

from __future__ import annotations

import re
from typing import Final

from sonde import vitals

_KEY: Final = re.compile(r"([^\s:]+):vital\.(\w+)")

_VITALS: Final = {
    vitals.FORWARDS: "forward passes",
    vitals.BACKWARDS: "backward passes",
    vitals.ROOT: "what backward() was called on",
    vitals.DROPPED: "dropout outside training",
    vitals.DATA_WAIT: "waiting for a data loader",
    vitals.STEP_TIME: "the time of a step",
    vitals.LEFTOVER: "gradients of two steps in a row",
    vitals.NO_GRADIENT: "parameters without a gradient",
    vitals.BACKWARDS_SEEN: "backward passes of an optimizer",
    vitals.CLIP_NORM: "gradient clipping",
    vitals.CLIP_MAX: "gradient clipping",
    vitals.SCALED_CLIP: "clipping under a gradient scaler",
    vitals.EVER_ACTIVE: "a ReLU",
    vitals.SATURATED: "a sigmoid, tanh or hardtanh",
    vitals.TRAINING: "modes of modules",
    vitals.UNIT_SAMPLES: "a ReLU",
    vitals.ATTENTION_ENTROPY: "attention weights",
    vitals.UNIT_GRADIENT: "gradients of a weight's rows",
    vitals.ROW_SPREAD: "the rows of a weight",
    vitals.ROW_SUM: "a loss over classes",
    vitals.ROW_MIN: "a loss over classes",
    vitals.COLUMN_SUM: "a loss over classes",
    vitals.ZERO_SHARE: "what the loss is given",
    vitals.SAMPLE_SPREAD: "what the loss is given",
    vitals.TARGET_SPREAD: "a target of real numbers",
    vitals.LABEL_ENTROPY: "class labels",
    vitals.LABEL_COUNTS: "class labels",
    vitals.RUNNING_LABEL_ENTROPY: "class labels",
    vitals.LABEL_RUN: "class labels",
    vitals.VALID_TARGETS: "a loss with ignore_index",
    vitals.PREDICTED_ENTROPY: "predicted classes",
    vitals.LOG_Z: "logits",
    vitals.COLUMN_LOG_Z: "logits",
    vitals.NEIGHBOUR_AGREEMENT: "enough samples with labels",
    vitals.COLUMN_SCALE: "a table of features as input",
    vitals.COLUMN_OFFSET: "a table of features as input",
}
_SERIES: Final = {
    "scheduler.last_epoch": "a scheduler: watch(..., scheduler=scheduler)",
    "scaler.scale": "a gradient scaler: watch(..., scaler=scaler)",
    "the data loader": "a data loader: watch(..., loader=loader)",
    "process.rss": "the memory of the process",
    "loss_fn:input.target": "what the loss is given",
    "loss_fn:output": "a loss function",
}


def in_words(lack: str) -> str:
    """Describe what was missing; what has no description is returned as it is.

    >>> in_words("optimizer:vital.clip_norm and gradients"), in_words("a validation loss")
    ('gradient clipping and gradients', 'a validation loss')
    """
    if lack in _SERIES:
        return _SERIES[lack]
    return " and ".join(_part(part) for part in lack.split(" and "))


def _part(lack: str) -> str:
    found = _KEY.fullmatch(lack)
    if found is None:
        return _SERIES.get(lack, lack)
    return _VITALS.get(found[2], f"{found[2].replace('_', ' ')} of {found[1]}")
