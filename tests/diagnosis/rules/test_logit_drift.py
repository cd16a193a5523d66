from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.diagnosis.rules.activations import logit_drift


def test_logits_that_drift_away_are_found():
    drifting = {"loss_fn:vital.log_z": list(np.linspace(2, 90, 60)), "loss:scalar": [2.3 - 0.03 * s for s in range(60)]}
    assert asked(logit_drift, patient(drifting)).severity == "info"
    assert asked(logit_drift, patient(drifting | {"loss:scalar": [2.3] * 60})).severity == "warning"
    assert asked(logit_drift, patient(drifting | {"loss_fn:vital.log_z": [90.0] * 60})) is None
