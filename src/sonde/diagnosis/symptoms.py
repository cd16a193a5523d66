"""Groups of findings that follow from the same kinds of faults; rules name them in `explains`."""

from __future__ import annotations

from typing import Final

NOT_FINITE: Final = ("nan_in_weights", "nan_forward", "nan_in_loss", "nan_backward", "nan_in_optimizer")
"""What follows once any number is not finite, in the order in which a step computes."""
TOO_FAR: Final = (
    *NOT_FINITE,
    "adam_eps_too_large",
    "attention_entropy_collapse",
    "clip_always_active",
    "constant_output",
    "dead_relu",
    "exploding_activation",
    "exploding_gradient",
    "fp16_overflow",
    "loss_scale_collapse",
    "saturated_activation",
    "vanishing_gradient",
)
"""What follows from steps that are too long."""
BADLY_SCALED: Final = (
    *NOT_FINITE,
    "clip_always_active",
    "constant_output",
    "dead_relu",
    "exploding_activation",
    "exploding_gradient",
    "large_initial_loss",
    "lr_too_high",
    "saturated_activation",
    "vanishing_gradient",
)
"""What follows from inputs, targets or weights that are far too large or too small."""
NOT_TRAINED: Final = (
    "class_imbalance_collapse",
    "constant_output",
    "dead_relu",
    "label_shuffle_mismatch",
    "large_initial_loss",
    "lr_too_low",
    "vanishing_gradient",
)
"""What a model looks like that cannot learn."""
ANY_STATISTIC: Final = (*TOO_FAR, *NOT_TRAINED, "bad_init_scale", "lr_too_high", "overfitting")
"""Everything that is judged from statistics and may follow from a fault in the program."""
