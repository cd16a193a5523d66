from __future__ import annotations

from patients import asked, patient

from sonde.core.facts import PROGRAM_EVENT, CallFacts, Facts, LossFacts
from sonde.diagnosis.rules.outcomes import overfitting
from sonde.records import Event


def run(last, *calls):
    losses = [2.0 - 0.018 * step for step in range(100)]
    best = [1.5, 1.2, 1.0]
    later = [1.0 + (last - 1.0) * (at + 1) / 7 for at in range(7)]
    values = [None] * 100
    values[9::10] = best + later
    done = {"program": Facts(program=calls).to_json()["program"]}
    events = [Event(event_type=PROGRAM_EVENT, message="", timestamp=0.0, data=done)]
    return asked(overfitting, patient({"loss:scalar": losses, "val_loss:scalar": values}, events=events))


def test_a_validation_loss_that_rises_while_training_goes_on_is_found():
    assert run(2.0).severity == "warning"
    assert run(2.0).step == 30
    assert run(1.2).severity == "info"  # a fifth of what had been gained


def load(*steps, about="(model)", own=False):
    return CallFacts(verb="load_state_dict", about=about, count=len(steps), steps=steps, data={"own": own})


def test_weights_that_are_loaded_after_the_last_step_undo_it():
    assert run(2.0, load(100)).severity == "info"
    assert run(2.0, load(30)).severity == "warning"
    assert run(2.0, load(100, own=True)).severity == "warning"
    assert run(2.0, load(100, about="")).severity == "warning"


def test_a_validation_loss_that_keeps_falling_is_not():
    assert run(0.6) is None


def by_heart(training, validation, chance=1.0):
    losses = [chance * max(0.9**step, training) for step in range(100)]
    values = [None] * 100
    values[9::10] = [chance * level for level in (0.9, 0.8, *[validation] * 8)]
    facts = Facts(losses=(LossFacts(kind="mse_loss", settings={"reduction": "mean"}),))
    readings = {"loss:scalar": losses, "val_loss:scalar": values, "loss_fn:vital.target_spread": [chance] * 100}
    return asked(overfitting, patient(readings, facts))


def test_data_known_by_heart_that_helps_with_nothing_else_is_found():
    found = by_heart(1e-4, 0.82)
    assert (found.severity, found.step) == ("warning", 20)


def test_a_model_that_knows_more_than_its_training_data_is_well():
    assert by_heart(1e-4, 0.3) is None
    assert by_heart(0.1, 0.82) is None
