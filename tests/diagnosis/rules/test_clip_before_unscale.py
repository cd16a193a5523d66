from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.optimizers import clip_before_unscale


def test_scaled_gradients_that_are_clipped_are_found():
    sick = {"optimizer:vital.scaled_clip": [1.0] * 4, "optimizer:vital.clip_norm": [65536.0] * 4}
    assert asked(clip_before_unscale, patient(sick)).sites == ("optimizer",)
    assert asked(clip_before_unscale, patient(sick | {"optimizer:vital.scaled_clip": [0.0] * 4})) is None
